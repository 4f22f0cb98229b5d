"""The variants that a project must offer by the rules of the Kernel Hub.

- A Python-only project: one variant for each backend; with an aot.toml, also those of its compiled form.
- A project on Torch's stable ABI: for each backend, one variant for each of its releases that serve the others; of
  CUDA, that is the oldest release of each major in the matrix, because every later minor release can load it. With
  `minver`, also the variants on the full C++ ABI of the Torch releases from there to the stable ABI's.
- A project on the full C++ ABI: for each of the newest Torch releases, one variant for each release of a backend that
  Torch is published for.
- A project on TVM FFI: as on the stable ABI, without a Torch release.
- Compiled projects offer these for each platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_builder.config import known_backends, matrix
from kernel_builder.config.project import Backend, Project, TorchFramework, TorchNoarch
from kernel_builder.config.variant import FullAbi, Noarch, StableAbi, TvmFfiAbi, Variant
from kernel_format.errors import ConfigError, VariantError
from kernel_format.release import Release, is_within


def limited(project: Project, only: Sequence[str]) -> Project:
    """Return a project whose kernels are compiled for these capabilities only, for local development."""
    backends = dict.fromkeys([*known_backends.compiled_for(), *project.backends])
    known = tuple(dict.fromkeys(arch for backend in backends for arch in backend.known_archs()))
    for capability in only:
        if capability not in known:
            raise ConfigError(
                f"{capability!r} is not a capability; expected one of {', '.join(known)}",
                where="--capability",
                hint="give only the number: 9.0 selects 9.0a, 9.0f and 9.0+PTX too",
            )
    if not only:
        return project
    kernels = [kernel.backend.limited(kernel, tuple(only)) for kernel in project.kernels]
    notes = (note for kernel in kernels for note in kernel.backend.notes(kernel))
    ahead = limited(project.ahead_of_time, only) if project.ahead_of_time else None
    warnings = tuple(dict.fromkeys((*project.warnings, *notes)))
    return replace(project, kernels=tuple(kernels), warnings=warnings, ahead_of_time=ahead)


def variants(project: Project, *, whole: bool = False) -> tuple[Variant, ...]:
    """Return the variants of a project, sorted by name.

    Args:
        whole: Return all variants of the matrix and not only those that the Hub asks for. A project on the stable ABI
            then also gets a variant for every CUDA release and for every single Torch release that its binaries work
            with, for old clients that do not know stable-ABI variants.
    """
    if isinstance(project.framework, TorchNoarch):
        chosen = [Variant(Noarch(), backend) for backend in project.backends]
        chosen += variants(project.ahead_of_time, whole=whole) if project.ahead_of_time else ()
    else:
        chosen = [variant for backend in project.backends for variant in _compiled(project, backend, whole)]
    return tuple(sorted(chosen, key=lambda variant: variant.name))


def _compiled(project: Project, backend: Backend, whole: bool) -> set[Variant]:
    if isinstance(project.framework, TorchNoarch) or backend.why_not_compiled(project):
        return set()
    return {
        Variant(framework, backend, release, platform)
        for framework in _frameworks(project, backend, whole)
        for release in _releases(project, framework, backend, whole)
        for platform in matrix.load().platforms
        if platform in (backend.platforms or [platform])
    }


def empty_backends(project: Project) -> dict[Backend, str]:
    """Return the backends that version ranges leave without a variant that the Hub asks for, each with the reason."""
    if isinstance(project.framework, TorchNoarch):
        return {}
    releases = ", ".join(map(str, matrix.load().torch))
    return {
        backend: f"the version ranges leave no {backend.name} variant that the Hub asks for: the matrix has Torch "
        f"{releases}"
        for backend in project.backends
        if backend not in skipped_backends(project) and not _compiled(project, backend, whole=False)
    }


def _frameworks(project: Project, backend: Backend, whole: bool) -> list[StableAbi | FullAbi | TvmFfiAbi]:
    known, framework = matrix.load(), project.framework
    if not isinstance(framework, TorchFramework):
        return [TvmFfiAbi(known.tvm_ffi)]
    in_range = [release for release in known.torch if is_within(release, framework.minver, framework.maxver)]
    floor = framework.stable_abi.get(backend)
    if floor is None:
        return [FullAbi(release) for release in (in_range if whole else in_range[-known.hub_releases :])]
    full = replace(project, framework=replace(framework, stable_abi={}))
    earlier = framework.minver is not None and not backend.why_not_compiled(full)
    return [StableAbi(floor), *(FullAbi(release) for release in in_range if (earlier if release < floor else whole))]


def _releases(
    project: Project, framework: StableAbi | FullAbi | TvmFfiAbi, backend: Backend, whole: bool
) -> Sequence[Release | None]:
    if isinstance(framework, FullAbi):
        return backend.allowed(project, backend.published().get(framework.release, ()))
    usable = backend.allowed(project, backend.releases())
    return usable if whole else backend.representative(usable)


@dataclass(frozen=True)
class Share:
    """The part of a project that one CI runner builds: the variants of one backend for one platform.

    `backend` is None for a Python-only project, whose variants are built together on any platform.
    """

    project: str
    name: str
    platform: str
    backend: str | None


def shares(directory: str, project: Project, *, whole: bool = False) -> tuple[Share, ...]:
    """Return the parts of a project that CI runners can build separately, in a fixed order.

    Args:
        directory: The project's directory as the runners name it.
    """
    offered = variants(project, whole=whole)
    parts = {
        (variant.platform or matrix.load().platforms[0], variant.backend.name if variant.platform else None)
        for variant in offered
    }
    return tuple(Share(directory, project.name, *part) for part in sorted(parts, key=str))


def skipped_backends(project: Project) -> tuple[Backend, ...]:
    """Return the backends of a compiled project that this builder does not compile it for."""
    if isinstance(project.framework, TorchNoarch):
        return ()
    return tuple(backend for backend in project.backends if not backend.compiles or backend.why_not_compiled(project))


def check_offered(project: Project, variant: Variant) -> None:
    """Raise an error for a variant of the matrix that the project does not offer, or one outside of the matrix."""
    if variant in variants(project, whole=True):
        return
    noarch = isinstance(project.framework, TorchNoarch)
    reason = "" if noarch else variant.backend.why_not_compiled(project)
    raise VariantError(
        f"is not a variant of the [{project.framework.table}] project {project.name}{f': {reason}' if reason else ''}",
        where=variant.name,
        hint=f"its variants are {', '.join(v.name for v in variants(project)) or 'none'}, and those of `kernel-builder "
        "list-variants --all`; for others, change `backends`, `minver`, `maxver` or `stable-abi` in build.toml",
    )
