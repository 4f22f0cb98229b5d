"""Compile one source and call its functions: `kernel_builder.load`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kernel_builder import inline_project, scaffold
from kernel_builder.backends.cuda.releases import capability_key, runs_on
from kernel_builder.config import known_backends
from kernel_builder.develop.choice import build_for_device
from kernel_format.cache_directory import default_cache
from kernel_format.errors import ConfigError, VariantError
from kernel_format.metadata import PackageMetadata

if TYPE_CHECKING:
    from torch import Tensor


Fake = Callable[..., "Tensor | Sequence[Tensor]"]
"""Takes the arguments of a function, and returns empty tensors with the shapes of its results."""


def load(source: str | Path, functions: str | Sequence[str], *, fakes: Mapping[str, Fake] | Fake | None = None) -> Any:
    """Compile a C++ or CUDA source for the running Torch, and return its functions.

    The compiler is the builder's own, so a CUDA source needs no CUDA installation. The result is cached: the same
    source is compiled once for each Torch release. The source may use `Tensor`, `empty_like`, `stream_of` and the
    includes of `kernel_builder/templates/inline/inline.h`.

    Args:
        source: The text, or the path of the file.
        functions: The name of a function in the source, or several. `inline_project.files` lists the types of their
            arguments. They are operators: positional arguments only, and no gradient.
        fakes: For `torch.compile`: for each function, a function that returns empty tensors with the shapes of the
            results for the same arguments, such as `lambda x, factor: torch.empty_like(x)`. For a single function, its
            fake itself. A function without results needs none.

    Returns:
        The function, or for several a namespace with one attribute for each.

    Raises:
        ConfigError: If the source does not have a function of that name.
        VariantError: If the installed Torch has no CUDA and the source needs it.
        BuildError: If the source does not compile; the message has the compiler's output.
    """
    import torch

    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    names = [functions] if isinstance(functions, str) else list(functions)
    by_name = {names[0]: fakes} if callable(fakes) else dict(fakes or {})
    if unknown := [name for name in by_name if name not in names]:
        raise ConfigError(f"{unknown[0]!r} is not one of the loaded functions ({', '.join(names)})", where="fakes")
    if inline_project.backend_of(text) == "cuda" and torch.version.cuda is None:
        raise VariantError(
            f"the source has CUDA kernels, and the installed Torch {torch.__version__} is not for CUDA",
            where="kernel_builder.load",
            hint="install a Torch for CUDA; or run the code on the CPU: `kernel-builder init ORG/NAME --from FILE --op "
            "FUNCTION`, then `kernel-builder emulate NAME`",
        )
    package = _package(f"#line 1\n{text}", names)  # the compiler's messages have the lines of the source
    for name, fake in by_name.items():
        torch.library.register_fake(getattr(package, name).name(), fake, allow_override=True)
    loaded = {name: getattr(package, name) for name in names}
    return loaded[functions] if isinstance(functions, str) else SimpleNamespace(**loaded)


def _package(source: str, functions: Sequence[str]) -> Any:
    """Return the package of the source, and build it first if the cache does not have it."""
    from kernels import get_local_kernel

    content = inline_project.files("local/inline", source, functions, stem="inline")
    backend = inline_project.backend_of(source)
    capabilities = known_backends.get(backend).current_archs()
    digest = hashlib.sha256(json.dumps([content, capabilities], sort_keys=True).encode()).hexdigest()[:16]
    project = default_cache() / "inline" / digest
    _check_device(project, capabilities)
    with suppress(FileNotFoundError):
        return get_local_kernel(project, backend=backend)
    scaffold.write(content, project, overwrite=True)
    build_for_device(project, backend, capabilities=capabilities)
    _check_device(project, capabilities)
    return get_local_kernel(project, backend=backend)


def _check_device(project: Path, capabilities: Sequence[str]) -> None:
    """Raise if there are packages, and none has code for the device, since the compiler does not know it."""
    packages = (PackageMetadata.read(file.parent) for file in project.glob("build/*/metadata.json"))
    archs = sorted({arch for package in packages if package for arch in package.archs}, key=capability_key)
    if archs and capabilities and not any(runs_on(arch, capabilities[0]) for arch in archs):
        raise VariantError(
            f"there is no code for this GPU, of capability {capabilities[0]}; the compiler has made code for "
            f"{', '.join(archs)}",
            where="kernel_builder.load",
            hint="use a compiler that knows the capability: `kernel-builder doctor` lists the CUDA releases",
        )
