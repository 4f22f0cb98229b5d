"""What the check `load` runs in a process of its own, as text: it must not need the builder.

    python -B -c "$(cat probe.py)" RESULT fits VARIANT...
    python -B -c "$(cat probe.py)" RESULT load DIRECTORY

Writes JSON to the file RESULT: for `fits` why the client would not choose each variant on this machine, or null; for
`load` an outcome (`loaded`, `skipped` or `failed`) and a text.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path


def _fits(names: list[str]) -> dict[str, str | None]:
    try:
        import torch  # noqa: F401
    except Exception as error:
        return dict.fromkeys(names, f"PyTorch cannot be imported: {error}")
    from kernels.variants import VariantRejected, parse_variant, resolve_variants

    answers: dict[str, str | None] = {}
    for name in names:
        _, decisions = resolve_variants([parse_variant(name)], _backend(name))
        if not decisions:
            answers[name] = "this Python cannot load modules built for the limited API"
        else:
            answers[name] = decisions[0].reason if isinstance(decisions[0], VariantRejected) else None
    return answers


def _backend(variant: str) -> str | None:
    """The backend to ask the client for; a machine with a GPU loads a variant for the CPU only when told to."""
    return "cpu" if "cpu" in variant.split("-") else None


def _load(directory: Path) -> tuple[str, str]:
    from kernels import Metadata, get_local_kernel
    from kernels.hf_hub import _get_hf_api
    from kernels.python_deps import validate_variant_dependencies
    from kernels.resolver import HubCacheResolver

    backend = _backend(directory.name)
    try:
        validate_variant_dependencies(directory)
    except ImportError as error:
        return "skipped", str(error)
    for dependency in Metadata.read_from_file(directory / "metadata.json").kernel_depends:
        try:
            HubCacheResolver(trust_remote_code=True).resolve(api=_get_hf_api(), backend=backend, kernel=dependency)
        except Exception as error:
            return "skipped", f"it depends on {dependency.repo_id}, which this machine does not have: {error}"
    try:
        get_local_kernel(directory, backend=backend, trust_remote_code=True)
    except BaseException as error:
        return "failed", "".join(traceback.format_exception_only(type(error), error)).strip()
    return "loaded", ""


if __name__ == "__main__":
    result, question, *arguments = sys.argv[1:]
    answer = _fits(arguments) if question == "fits" else _load(Path(arguments[0]))
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
