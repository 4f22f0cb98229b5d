"""Find the variants of a project that this machine can build, and the obstacles to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_builder import backends
from kernel_builder.backends.tools import Obstacle
from kernel_builder.config import kernel_sources, known_backends, matrix, notices, offered
from kernel_builder.config.project import Project
from kernel_builder.config.variant import StableAbi, TvmFfiAbi, Variant, this_platform
from kernel_builder.plural import listed
from kernel_builder.steps import crates
from kernel_builder.toolchain import Toolchains, components
from kernel_format.errors import ToolchainError, VariantError


@dataclass(frozen=True)
class UnavailableVariant:
    """A variant that the Hub asks for and this machine cannot build."""

    project: str
    variant: str
    reason: str
    hint: str


def obstacle(project: Project, variant: Variant, toolchains: Toolchains) -> Obstacle | None:
    """Return the obstacle to building a variant of a project on this machine, or None. Uses no network."""
    if variant.platform is None:
        return None
    project = project.ahead_of_time or project
    oldest = matrix.load().oldest_stable
    if isinstance(variant.framework, StableAbi) and variant.framework.release < oldest:
        return Obstacle(
            f"the stable ABI of Torch {variant.framework.release} has no headers; the oldest that can be targeted is "
            f"{oldest}",
            f'set [torch] stable-abi = "{oldest}" in build.toml',
        )
    # A missing header library comes first: another CUDA toolkit does not help.
    own = [kernel for kernel in project.kernels if kernel.backend is variant.backend]
    for name in dict.fromkeys(name for kernel in own for name in kernel.depends if name != "torch"):
        if missing := toolchains.dependency_obstacle(name):
            return missing
    if variant.platform != this_platform():  # without one for this platform, the build is an error
        try:
            toolchains.host(variant.platform)
        except ToolchainError as error:
            return Obstacle(f"this machine has no compiler for {variant.platform}: {error}", error.hint or "")
    kernels = kernel_sources.of_backend(project, variant.backend, variant.release)
    if any(kernel.cargo_manifest for kernel in kernels) and (unusable := crates.obstacle(variant)):
        return unusable
    backend = backends.compiled(variant.backend)
    if not isinstance(variant.framework, TvmFfiAbi):
        return backend.obstacle(toolchains, variant.release)
    headers = toolchains.component_obstacle(components.tvm_ffi_headers(variant.framework))
    return headers or backend.obstacle(toolchains, variant.release, with_torch=False)


def named(project: Project, name: str, toolchains: Toolchains) -> Variant:
    """Return the variant of a name.

    Raises:
        VariantError: If the project does not offer it, or this machine cannot build it.
    """
    variant = Variant.parse(name)
    offered.check_offered(project, variant)
    if reason := obstacle(project, variant, toolchains):
        raise VariantError(f"cannot be built here: {reason.reason}", where=name, hint=reason.hint)
    return variant


def available(
    project: Project,
    toolchains: Toolchains,
    *,
    backends: Sequence[str] = (),
    platforms: Sequence[str] = (),
    whole: bool = False,
) -> tuple[tuple[Variant, ...], tuple[UnavailableVariant, ...]]:
    """Return the requested variants that this machine can build, and the project's other variants."""
    requested = tuple(platforms) or (this_platform(),)
    buildable: list[Variant] = []
    unavailable: list[UnavailableVariant] = []
    for variant in offered.variants(project, whole=whole):
        if backends and variant.backend.name not in backends:
            continue
        if variant.platform in (None, *requested):
            reason = obstacle(project, variant, toolchains)
        else:
            reason = Obstacle(
                f"for {variant.platform}, and this build is for {' and '.join(requested)}",
                f"add `--platform {variant.platform}`, or `--platform all`",
            )
        if reason is None:
            buildable.append(variant)
        else:
            unavailable.append(UnavailableVariant(project.name, variant.name, reason.reason, reason.hint))
    if not buildable:
        if backends:  # the message has the reasons of these alone
            of = tuple(backend for backend in project.backends if backend.name in backends)
            project = replace(project, backends=of, kernels=tuple(k for k in project.kernels if k.backend in of))
        raise _nothing(project, backends or tuple(map(str, project.backends)), requested, unavailable)
    return tuple(buildable), tuple(unavailable)


def _nothing(
    project: Project, backends: Sequence[str], platforms: Sequence[str], unavailable: Sequence[UnavailableVariant]
) -> VariantError:
    """Return the error for a project without a variant to build here, with the obstacle to the nearest variant."""
    message = f"there is no variant to build here for {', '.join(backends)}"
    if unavailable:
        nearest = min(unavailable, key=lambda missing: not missing.variant.endswith(tuple(platforms)))
        return VariantError(
            f"{message}; {nearest.variant}: {nearest.reason}", where=str(project.root), hint=nearest.hint
        )
    reasons = "".join(f"; {notice}" for notice in notices.of_project(project))
    compiled = listed(backend.name for backend in known_backends.compiled_for())
    return VariantError(
        f"{message}{reasons}",
        where=f"{project.root / 'build.toml'}: [general] backends; [torch] and [general.cuda] minver, maxver",
        hint="widen the range, or change the backends: this builder compiles [torch] and [tvm-ffi] for "
        f"{compiled}, and packages [torch-noarch] for all backends",
    )
