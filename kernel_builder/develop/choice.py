"""Selects the variant to develop or test if the user does not name one, and builds for the installed Torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.checks import fit
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import FullAbi, Noarch, Release, Variant, this_platform
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.steps import buildable
from kernel_builder.toolchain import Toolchains
from kernel_format import metadata
from kernel_format.errors import PackageError, ToolchainError, VariantError

TORCH_INDEX = "https://download.pytorch.org/whl"
_NONE = Release(0, 0)


def to_develop(project: Project, name: str | None, toolchains: Toolchains) -> Variant:
    """Return the variant of this name, or else the one that the installed Torch loads, or else the newest."""
    if name:
        return buildable.named(project, name, toolchains)
    offered, _ = buildable.available(project, toolchains)
    every, _ = buildable.available(project, toolchains, whole=True)
    return newest(loadable(offered) or loadable(every) or offered)


def built(project: Project, name: str | None) -> Variant:
    """Return the built variant of this name, or else the one that the installed Torch loads.

    If Torch loads none, this is the newest variant for this machine's hardware.
    """
    build = project.root / "build"
    of = [Variant.parse(name).platform] if name else [None, this_platform()]
    variants = [each for each in built_variants(project.root) if each.platform in of and name in (None, each.name)]
    if not variants:
        raise PackageError(
            "the variant has not been built" if name else f"there is no package for {this_platform()}",
            where=str(build / (name or "")),
            hint=f"build it first: kernel-builder build {project.root}" + (f" --variant {name}" if name else ""),
        )
    at_hand = [variant for variant in variants if variant.backend.is_present()]
    return newest(loadable(variants) or at_hand or variants)


def built_variants(directory: Path) -> list[Variant]:
    """Return the variants that have a package in a project's `build`."""
    names = sorted(file.parent.name for file in (directory / "build").glob(f"*/{metadata.NAME}"))
    return [variant for name in names if (variant := Variant.find(name))]


def loadable(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants that the client would load into the Torch of this interpreter."""
    environment = fit.this_environment()
    return [variant for variant in variants if fit.loads(variant, environment)]


def require_loadable(variant: Variant) -> None:
    """Raise a ToolchainError unless the client would load a variant into the Torch of this interpreter."""
    if loadable([variant]):
        return
    torch = f"torch=={variant.framework.release}.*" if isinstance(variant.framework, FullAbi) else "torch"
    raise ToolchainError(
        "this interpreter has no Torch that loads the variant",
        where=f"{variant.name}, {sys.executable}",
        hint=f"install kernel-builder in an environment with one: pip install '{torch}' "
        f"--index-url {TORCH_INDEX}/{variant.backend.torch_index(variant.release)}",
    )


def newest(variants: Sequence[Variant]) -> Variant:
    """Return the variant of the preferred backend, and of these for its newest release."""

    def rank(variant: Variant) -> tuple[int, Release, Release]:
        torch = _NONE if isinstance(variant.framework, Noarch) else variant.framework.release
        return variant.backend.preference, variant.release or _NONE, torch

    return max(variants, key=rank)


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


def require_built(directory: Path, backend: str) -> None:
    """Raise a VariantError unless a project has a package of one backend that the installed Torch loads."""
    built = [variant for variant in built_variants(directory) if variant.backend.name == backend]
    if not loadable(built):
        names = ", ".join(variant.name for variant in built) or "none"
        raise VariantError(
            f"there is no package for {backend} that this machine loads (built: {names})",
            where=str(directory / "build"),
            hint="build for the Torch and the CUDA of this machine",
        )
