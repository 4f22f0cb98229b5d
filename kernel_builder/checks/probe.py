"""The script that the check `load` runs in a fresh process. It must not import the builder.

    python -B -c "$(cat probe.py)" RESULT fits VARIANT...
    python -B -c "$(cat probe.py)" RESULT load DIRECTORY
    python -B -c "$(cat probe.py)" RESULT describe DIRECTORY

It writes JSON to the file RESULT. `fits`: why the client would reject each variant on this machine, or null. `load`: an
outcome (`loaded`, `skipped` or `failed`) and a message. `describe`: an outcome and, if it is `loaded`, the members of
the module and the schemas of its ops, for `kernel_builder.hub.package_api`.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


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
    """Return the backend to ask the client for. With a GPU, it loads a CPU variant only on request."""
    return "cpu" if "cpu" in variant.split("-") else None


def _load(directory: Path) -> tuple[str, Any]:
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
        module = get_local_kernel(directory, backend=backend, trust_remote_code=True)
    except BaseException as error:
        return "failed", "".join(traceback.format_exception_only(type(error), error)).strip()
    return "loaded", module


def _describe(directory: Path) -> tuple[str, Any]:
    from kernels import Metadata

    outcome, module = _load(directory)
    if outcome != "loaded":
        return outcome, module
    members: dict[str, dict[str, str]] = {}
    _members(module, "", members)
    namespace = f"{Metadata.read_from_file(directory / 'metadata.json').id}::"
    return "loaded", {"members": members, "ops": _schemas(namespace)}


def _members(owner: ModuleType | type, prefix: str, found: dict[str, dict[str, str]]) -> None:
    """Describe the public names of a module or class, recursively for its classes and submodules."""
    listed = getattr(owner, "__all__", None) if isinstance(owner, ModuleType) else vars(owner)
    for name in sorted(vars(owner) if listed is None else listed):
        value = inspect.getattr_static(owner, name, None)
        value = getattr(value, "__func__", value)
        if listed is None or isinstance(owner, type):
            foreign = isinstance(value, ModuleType) or getattr(value, "__module__", owner.__name__) != owner.__name__
            if name.startswith("_") or (isinstance(owner, ModuleType) and foreign):
                continue
        if isinstance(value, ModuleType):
            kind, signature = "module", ""
        elif isinstance(value, type):
            kind, signature = "class", ""
        elif callable(value):
            kind, signature = "function", _signature(value)
        else:
            kind, signature = "attribute", ""
        summary = (
            "" if kind == "attribute" else inspect.cleandoc(getattr(value, "__doc__", None) or "").partition("\n")[0]
        )
        found[prefix + name] = {"kind": kind, "signature": signature, "summary": summary}
        if kind == "class" or (kind == "module" and value.__name__.startswith(f"{owner.__name__}.")):
            _members(value, f"{prefix}{name}.", found)


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"


def _schemas(namespace: str) -> dict[str, str]:
    try:
        import torch
    except ImportError:
        return {}
    schemas = [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(namespace)]
    return {text.partition("(")[0].removeprefix(namespace): text.removeprefix(namespace) for text in schemas}


if __name__ == "__main__":
    result, question, *arguments = sys.argv[1:]
    answer: Any
    if question == "fits":
        answer = _fits(arguments)
    elif question == "describe":
        answer = _describe(Path(arguments[0]))
    else:
        outcome, told = _load(Path(arguments[0]))
        answer = outcome, "" if outcome == "loaded" else told
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
