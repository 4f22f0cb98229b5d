"""Which of a project's variants this machine can build, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.errors import VariantError
from kernel_builder.toolchain.tools import Obstacle

if TYPE_CHECKING:
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class UnavailableVariant:
    """A variant that the Hub asks for and this machine cannot build."""

    project: str
    variant: str
    reason: str
    hint: str


def obstacle(variant: Variant, toolchains: Toolchains) -> Obstacle | None:
    """Return why this machine cannot build a variant, or None if it can."""
    if variant.platform is None:
        return None
    if variant.cuda is not None:
        return toolchains.cuda_obstacle(variant.cuda, variant.platform)
    if variant.platform != this_platform():
        return Obstacle(
            f"this machine is {this_platform()}",
            f"build it on a machine or CI runner with {variant.platform}, with the same command",
        )
    return None


def named(project: Project, names: Sequence[str], toolchains: Toolchains) -> tuple[Variant, ...]:
    """Return the variants of these names, each once.

    Raises:
        VariantError: If one is not a variant's name, not the project's, or cannot be built here.
    """
    chosen = []
    for name in dict.fromkeys(names):
        variant = Variant.parse(name)
        offered.check_offered(project, variant)
        if found := obstacle(variant, toolchains):
            raise VariantError(f"cannot be built here: {found.reason}", where=name, hint=found.hint)
        chosen.append(variant)
    return tuple(chosen)


def available(
    project: Project, toolchains: Toolchains, *, backends: Sequence[str] = (), whole: bool = False
) -> tuple[tuple[Variant, ...], tuple[UnavailableVariant, ...]]:
    """Return the variants that this machine can build, and the others that the project offers.

    Args:
        backends: Only these backends; empty for all.
        whole: All variants of the matrix, not only those that the Hub asks for.

    Raises:
        VariantError: If there is none to build.
    """
    buildable: list[Variant] = []
    unavailable: list[UnavailableVariant] = []
    for variant in offered.variants(project, whole=whole):
        if backends and variant.backend not in backends:
            continue
        found = obstacle(variant, toolchains)
        if found is None:
            buildable.append(variant)
        else:
            unavailable.append(UnavailableVariant(project.name, variant.name, found.reason, found.hint))
    if not buildable:
        why = f"; {unavailable[0].variant}: {unavailable[0].reason}" if unavailable else ""
        raise VariantError(
            f"there is no variant to build here for the backends {', '.join(backends or project.backends)}{why}",
            where=str(project.root),
            hint=unavailable[0].hint if unavailable else "this builder compiles for cpu and cuda",
        )
    return tuple(buildable), tuple(unavailable)
