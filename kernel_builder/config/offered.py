"""The variants that a project must offer by the rules of the Kernel Hub.

- A Python-only project: one variant for each backend.
- A project on Torch's stable ABI: one CPU variant, and one for each CUDA major, built with the oldest CUDA release of
  that major in the matrix because every later minor release can load it.
- A project on the full C++ ABI: for each of the newest Torch releases, one CPU variant and one for each CUDA release
  that Torch is published for.
- Compiled projects offer these for each platform.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernel_builder.config import matrix
from kernel_builder.config.project import Kernel, Project, TorchFramework, TorchNoarch
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, Variant
from kernel_builder.errors import ConfigError, VariantError

# The backends that this builder compiles for. A project may name the other ones of the format; they are skipped.
COMPILED_BACKENDS = ("cpu", "cuda")


def _capability_key(capability: str) -> tuple[int, int, str]:
    match = re.match(r"(\d+)\.(\d+)(.*)", capability)
    assert match, capability
    return int(match[1]), int(match[2]), match[3]


def _number(capability: str) -> str:
    return re.sub(r"[af]?(\+PTX)?$", "", capability)


def capabilities(kernel: Kernel, cuda: Release, platform: str) -> tuple[str, ...]:
    """Return the capabilities to compile a kernel for, ascending.

    These are the entries of the kernel's list that the compiler knows and the platform has. A kernel without a list
    gets all such capabilities, and PTX of the newest. `Kernel.only_capabilities` selects among these. For a CUDA
    release that is not in the matrix, the newest release of the matrix below it stands in, or else the oldest.

    Raises:
        VariantError: If no entry of the kernel's list is left.
    """
    known_matrix = matrix.load()
    at_or_below = [release for release in known_matrix.capabilities if release <= cuda]
    known = set(known_matrix.capabilities[max(at_or_below) if at_or_below else min(known_matrix.capabilities)])
    if platform not in known_matrix.tegra_platforms:
        known -= known_matrix.tegra
    if kernel.cuda_capabilities is None:
        newest = max(known, key=_capability_key)
        every = tuple(f"{c}+PTX" if c == newest else c for c in sorted(known, key=_capability_key))
        return _nearest(every, kernel.only_capabilities)
    wanted = {c for c in kernel.cuda_capabilities if _number(c) in known}
    if not wanted:
        raise _none_left(kernel, kernel.cuda_capabilities, cuda, platform)
    return _nearest(tuple(sorted(wanted, key=_capability_key)), kernel.only_capabilities)


def _none_left(kernel: Kernel, listed: Sequence[str], cuda: Release, platform: str) -> VariantError:
    known = matrix.load()
    here = platform in known.tegra_platforms
    elsewhere = [c for c in listed if not here and _number(c) in known.tegra]
    unknown = [c for c in listed if c not in elsewhere]
    reasons = [f"CUDA {cuda} does not compile for {', '.join(unknown)}"] if unknown else []
    reasons += [f"no {platform} machine has {', '.join(elsewhere)}"] if elsewhere else []
    hint = "add a capability"
    numbers = {_number(c) for c in unknown}
    if knowing := [release for release, of_release in known.capabilities.items() if numbers & set(of_release)]:
        bound = f'minver = "{min(knowing)}"' if min(knowing) > cuda else f'maxver = "{max(knowing)}"'
        hint += f", or leave this CUDA release out by [general.cuda] {bound}"
    return VariantError(
        f"no capability is left: {', and '.join(reasons)}",
        where=f"build.toml: [kernel.{kernel.name}] cuda-capabilities",
        hint=hint,
    )


def _nearest(ascending: tuple[str, ...], only: Sequence[str]) -> tuple[str, ...]:
    """Return the entries for the capabilities in `only`, each with its suffix; all if `only` is empty.

    A capability without an entry of its number gets the nearest entry below it, whose code a GPU of that capability may
    run, or else the lowest: the link needs the symbols of every kernel.
    """
    if not only:
        return ascending
    numbers = [_capability_key(entry)[:2] for entry in ascending]
    chosen = set()
    for number in (_capability_key(capability)[:2] for capability in only):
        chosen.add(max((n for n in numbers if n <= number), default=numbers[0]))
    return tuple(entry for entry, number in zip(ascending, numbers, strict=True) if number in chosen)


def limited(project: Project, only: Sequence[str]) -> Project:
    """Return a project whose kernels are compiled for these capabilities only, for local development.

    Raises:
        ConfigError: If one is not the number of a capability.
    """
    for capability in only:
        if capability not in matrix.known_capabilities():
            raise ConfigError(
                f"{capability!r} is not a capability; expected one of "
                f"{', '.join(sorted(matrix.known_capabilities(), key=_capability_key))}",
                where="--capability",
                hint="give the number alone: 9.0 selects 9.0a, 9.0f and 9.0+PTX too",
            )
    return replace(project, kernels=tuple(replace(one, only_capabilities=tuple(only)) for one in project.kernels))


def archs(kernels: Sequence[Kernel], cuda: Release, platform: str) -> tuple[str, ...]:
    """Return the capabilities of all kernels of a binary together, ascending, as its metadata lists them.

    Raises:
        VariantError: As `capabilities`.
    """
    return tuple(sorted({c for kernel in kernels for c in capabilities(kernel, cuda, platform)}, key=_capability_key))


def _in_range(release: Release, low: Release | None, high: Release | None) -> bool:
    return (low is None or low <= release) and (high is None or release <= high)


def _cuda_in_range(project: Project, releases: Sequence[Release]) -> list[Release]:
    """Return the releases that `[general.cuda]` allows and at least one kernel can be compiled with."""
    floors = [kernel.cuda_minver for kernel in project.kernels if kernel.backend == "cuda"]
    needed = min((floor for floor in floors if floor), default=None) if all(floors) else None
    low = max((floor for floor in (needed, project.cuda_minver) if floor), default=None)
    return [release for release in releases if _in_range(release, low, project.cuda_maxver)]


def _oldest_of_each_major(releases: Sequence[Release]) -> list[Release]:
    oldest: dict[int, Release] = {}
    for release in sorted(releases):
        oldest.setdefault(release.major, release)
    return list(oldest.values())


def variants(project: Project, *, whole: bool = False) -> tuple[Variant, ...]:
    """Return the variants of a project, sorted by name.

    Args:
        whole: Return all variants of the matrix and not only those that the Hub asks for. A project on the stable ABI
            then also gets a variant for every CUDA release and for every single Torch release that its binaries work
            with, for old clients that do not know stable-ABI variants.
    """
    if isinstance(project.framework, TorchNoarch):
        found = [Variant(Noarch(), backend) for backend in project.backends]
    else:
        found = [variant for backend in project.backends for variant in _compiled(project, backend, whole)]
    return tuple(sorted(found, key=lambda variant: variant.name))


def _compiled(project: Project, backend: str, whole: bool) -> set[Variant]:
    if backend not in COMPILED_BACKENDS or not isinstance(project.framework, TorchFramework):
        return set()
    return {
        Variant(framework, backend, cuda, platform)
        for framework in _frameworks(project.framework, backend, whole)
        for cuda in (_cuda_releases(project, framework, whole) if backend == "cuda" else [None])
        for platform in matrix.load().platforms
    }


def empty_backends(project: Project) -> dict[str, str]:
    """Return the backends that version ranges leave without a variant that the Hub asks for, each with the reason."""
    if not isinstance(project.framework, TorchFramework):
        return {}
    known = matrix.load()
    reason = (
        f"the matrix has Torch {', '.join(map(str, known.torch))} and CUDA {', '.join(map(str, known.capabilities))}"
    )
    return {
        backend: f"the version ranges leave no {backend} variant that the Hub asks for: {reason}"
        for backend in project.backends
        if backend in COMPILED_BACKENDS and not _compiled(project, backend, whole=False)
    }


def _frameworks(framework: TorchFramework, backend: str, whole: bool) -> list[StableAbi | FullAbi]:
    known = matrix.load()
    in_range = [release for release in known.torch if _in_range(release, framework.minver, framework.maxver)]
    floor = framework.stable_abi.get(backend)
    if floor is None:
        return [FullAbi(release) for release in (in_range if whole else in_range[-known.hub_releases :])]
    every = [FullAbi(release) for release in in_range if release >= floor] if whole else []
    return [StableAbi(floor), *every]


def _cuda_releases(project: Project, framework: StableAbi | FullAbi, whole: bool) -> list[Release]:
    known = matrix.load()
    if isinstance(framework, FullAbi):
        return _cuda_in_range(project, known.torch[framework.release])
    usable = _cuda_in_range(project, tuple(known.capabilities))
    return usable if whole else _oldest_of_each_major(usable)


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
        (variant.platform or matrix.load().platforms[0], variant.backend if variant.platform else None)
        for variant in offered
    }
    return tuple(Share(directory, project.name, *part) for part in sorted(parts, key=str))


def skipped_backends(project: Project) -> tuple[str, ...]:
    """Return the backends of a compiled project that this builder does not compile for.

    These are all backends of a project with `[tvm-ffi]`.
    """
    if isinstance(project.framework, TorchNoarch):
        return ()
    compiled = COMPILED_BACKENDS if isinstance(project.framework, TorchFramework) else ()
    return tuple(backend for backend in project.backends if backend not in compiled)


def check_offered(project: Project, variant: Variant) -> None:
    """Raise an error for a variant that the project's own `build.toml` rules out.

    Variants outside the matrix are allowed: any Torch and CUDA release in the project's ranges can be named.

    Raises:
        VariantError: If the backend, ABI or version is not one the project offers.
    """

    def refuse(message: str, hint: str) -> VariantError:
        return VariantError(message, where=f"{project.name}: {variant.name}", hint=hint)

    names = ", ".join(v.name for v in variants(project)) or "none"
    listed = f"the variants of this project are: {names}"
    if variant.backend not in project.backends:
        raise refuse(f"the project has no {variant.backend} backend", listed)
    if isinstance(project.framework, TorchNoarch):
        if not isinstance(variant.framework, Noarch):
            raise refuse("the project is Python only and has no compiled variants", listed)
        return
    if not isinstance(project.framework, TorchFramework) or isinstance(variant.framework, Noarch):
        raise refuse("the project is compiled and has no Python-only variants", listed)
    floor = project.framework.stable_abi.get(variant.backend)
    release = variant.framework.release
    if isinstance(variant.framework, StableAbi) and variant.framework.release != floor:
        raise refuse(
            f"the project's stable ABI for {variant.backend} is {floor}" if floor else "the project has no stable ABI",
            "set [torch] stable-abi in build.toml to the oldest Torch release to support" if not floor else listed,
        )
    if floor and release < floor:
        raise refuse(f"the project's stable ABI starts at Torch {floor}", listed)
    if not floor and not _in_range(release, project.framework.minver, project.framework.maxver):
        raise refuse(f"[torch] minver and maxver rule out Torch {release}", listed)
    if variant.cuda and variant.cuda not in _cuda_in_range(project, [variant.cuda]):
        raise refuse(f"[general.cuda] minver and maxver or a kernel's cuda-minver rule out CUDA {variant.cuda}", listed)
