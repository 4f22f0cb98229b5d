"""Builds a project for the installed Torch, or checks that it has been built for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_builder.config.project_files import read_project
from kernel_builder.develop.choice import built_variants, loadable
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.steps import buildable
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import BuildError, VariantError


def build_for_device(directory: Path, backend: str, *, capabilities: Sequence[str] = (), load: bool = True) -> None:
    """Build the variants of one backend that the installed Torch loads, or all of them if it loads none.

    Args:
        directory: The project. The packages are written to its `build/`.
        backend: "cpu" or "cuda".
        capabilities: Compile only for these; empty for the capabilities of the project.
        load: Whether to load the package as a check, which imports Torch.

    Raises:
        KernelBuilderError: If the project cannot be built, or a package does not pass its checks.
    """
    toolchains = Toolchains()
    variants, _ = buildable.available(read_project(directory), toolchains, backends=(backend,))
    chosen = variants if len(variants) == 1 else loadable(variants) or variants
    names = tuple(variant.name for variant in chosen)
    summary = build(BuildRequest((directory,), names, capabilities=tuple(capabilities), load=load), toolchains)
    if summary.failures:
        raise summary.failures[0].errors[0]
    if not summary.packages:
        raise BuildError(
            f"this machine cannot build any {backend} variant of the project",
            where=str(directory),
            hint=f"add a [kernel] with backend = {backend!r}",
        )


def require_built(directory: Path, backend: str) -> None:
    """Check that a project has a package of one backend that the installed Torch loads.

    Raises:
        VariantError: If it has none.
    """
    built = [variant for variant in built_variants(directory) if variant.backend.name == backend]
    if not loadable(built):
        names = ", ".join(variant.name for variant in built) or "none"
        raise VariantError(
            f"there is no package for {backend} that this machine loads (built: {names})",
            where=str(directory / "build"),
            hint="build for the Torch and the CUDA of this machine",
        )
