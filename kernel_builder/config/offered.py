"""The variants that a project must offer, by the rules of the Kernel Hub; the matrix has the data.

- A Python-only project offers one variant for each backend.
- A project on Torch's stable ABI offers one for each CUDA major, built with the oldest CUDA release of that major in
  the matrix, since every later minor release accepts it; and one for the CPU.
- A project on the full C++ ABI offers the newest Torch releases times the CUDA releases that each is published for, and
  the CPU.
- A compiled project offers all of this for each platform.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_builder.config import matrix
from kernel_builder.config.project import Kernel, Project, TorchFramework, TorchNoarch
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, Variant
from kernel_builder.errors import VariantError

# The backends that this builder compiles for. The format has more; projects may name them, and they are skipped.
COMPILED_BACKENDS = ("cpu", "cuda")


def _capability_key(capability: str) -> tuple[int, int, str]:
    match = re.match(r"(\d+)\.(\d+)(.*)", capability)
    assert match, capability
    return int(match[1]), int(match[2]), match[3]


def capabilities(kernel: Kernel, cuda: Release, platform: str) -> tuple[str, ...]:
    """What to compile a kernel for: its own list where the compiler knows the entry, else all and PTX of the newest.

    What no machine of the platform has is left out. A CUDA release that is not in the matrix (a toolkit of the user's)
    is taken to know what the newest release at or below it knows, or the oldest one's where there is none.

    Raises:
        VariantError: If nothing of the kernel's list is left.
    """
    known_matrix = matrix.load()
    at_or_below = [release for release in known_matrix.capabilities if release <= cuda]
    known = set(known_matrix.capabilities[max(at_or_below) if at_or_below else min(known_matrix.capabilities)])
    if platform not in known_matrix.tegra_platforms:
        known -= known_matrix.tegra
    if kernel.cuda_capabilities is None:
        newest = max(known, key=_capability_key)
        return tuple(f"{c}+PTX" if c == newest else c for c in sorted(known, key=_capability_key))
    wanted = {c for c in kernel.cuda_capabilities if re.sub(r"[af]?(\+PTX)?$", "", c) in known}
    if not wanted:
        raise VariantError(
            f"CUDA {cuda} compiles for none of {', '.join(kernel.cuda_capabilities)}, or no {platform} machine has it",
            where=f"build.toml: [kernel.{kernel.name}] cuda-capabilities",
            hint="add a capability, or leave the CUDA release out: cuda-minver, [general.cuda] maxver",
        )
    return tuple(sorted(wanted, key=_capability_key))


def archs(kernels: Sequence[Kernel], cuda: Release, platform: str) -> tuple[str, ...]:
    """The capabilities of a whole binary, as its metadata lists them: those of any of its kernels, ascending.

    Raises:
        VariantError: As `capabilities` does.
    """
    return tuple(sorted({c for kernel in kernels for c in capabilities(kernel, cuda, platform)}, key=_capability_key))


def _in_range(release: Release, low: Release | None, high: Release | None) -> bool:
    return (low is None or low <= release) and (high is None or release <= high)


def _cuda_releases_of(project: Project, releases: Sequence[Release]) -> list[Release]:
    needed = [kernel.cuda_minver for kernel in project.kernels if kernel.backend == "cuda" and kernel.cuda_minver]
    low = max([*needed, *([project.cuda_minver] if project.cuda_minver else [])], default=None)
    return [release for release in releases if _in_range(release, low, project.cuda_maxver)]


def _oldest_of_each_major(releases: Sequence[Release]) -> list[Release]:
    oldest: dict[int, Release] = {}
    for release in sorted(releases):
        oldest.setdefault(release.major, release)
    return list(oldest.values())


def variants(project: Project, *, whole: bool = False) -> tuple[Variant, ...]:
    """The variants of a project, sorted by name: what the Hub asks for, or with `whole` all that the matrix has.

    With `whole`, a project on the stable ABI also gets the variants of every single Torch release that its binaries
    serve, and every CUDA release: for old clients that do not know the stable ABI's variants.

    Raises:
        VariantError: If a version range of the project leaves a backend without a variant.
    """
    known_matrix = matrix.load()
    found: set[Variant] = set()
    if isinstance(project.framework, TorchNoarch):
        return tuple(sorted((Variant(Noarch(), backend) for backend in project.backends), key=lambda v: v.name))
    if not isinstance(project.framework, TorchFramework):
        return ()
    framework = project.framework
    for backend in project.backends:
        if backend not in COMPILED_BACKENDS:
            continue
        frameworks: list[StableAbi | FullAbi] = []
        floor = framework.stable_abi.get(backend)
        in_range = [r for r in known_matrix.torch if _in_range(r, framework.minver, framework.maxver)]
        if floor:
            frameworks.append(StableAbi(floor))
            if whole:
                frameworks += [FullAbi(release) for release in in_range if release >= floor]
        else:
            frameworks += [
                FullAbi(release) for release in (in_range if whole else in_range[-known_matrix.hub_releases :])
            ]
        before = len(found)
        for offered in frameworks:
            if backend == "cpu":
                cudas: list[Release | None] = [None]
            else:
                published = (
                    known_matrix.torch[offered.release]
                    if isinstance(offered, FullAbi)
                    else tuple(known_matrix.capabilities)
                )
                usable = _cuda_releases_of(project, published)
                one_each = isinstance(offered, StableAbi) and not whole
                cudas = list(_oldest_of_each_major(usable) if one_each else usable)
            found.update(
                Variant(offered, backend, cuda, platform) for cuda in cudas for platform in known_matrix.platforms
            )
        if len(found) == before:
            raise VariantError(
                f"the version ranges leave no {backend} variant: the matrix has Torch "
                f"{', '.join(map(str, known_matrix.torch))} and CUDA {', '.join(map(str, known_matrix.capabilities))}",
                where=f"{project.root / 'build.toml'}: [torch] minver, maxver; [general.cuda] minver, maxver",
                hint="widen the range, or drop it: the Hub asks for the newest releases",
            )
    return tuple(sorted(found, key=lambda variant: variant.name))


@dataclass(frozen=True)
class Share:
    """What one runner builds of a project: the variants of one backend for one platform.

    `backend` is None where the project is Python only and all of it is built at once, on any platform.
    """

    project: str
    name: str
    platform: str
    backend: str | None


def shares(directory: str, project: Project, *, whole: bool = False) -> tuple[Share, ...]:
    """The parts of a project that runners can build apart, in a fixed order. `directory` is what they call it."""
    offered = variants(project, whole=whole)
    parts = {
        (variant.platform or matrix.load().platforms[0], variant.backend if variant.platform else None)
        for variant in offered
    }
    return tuple(Share(directory, project.name, *part) for part in sorted(parts, key=str))


def skipped_backends(project: Project) -> tuple[str, ...]:
    """The backends of a compiled project that this builder validates but cannot build."""
    if isinstance(project.framework, TorchNoarch):
        return ()
    return tuple(backend for backend in project.backends if backend not in COMPILED_BACKENDS)


def check_offered(project: Project, variant: Variant) -> None:
    """Refuse a variant that the project's own `build.toml` rules out.

    Variants outside the matrix are fine: any Torch and CUDA release in the project's ranges can be asked for by name.

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
            "set [torch] stable-abi in build.toml to the oldest Torch release to serve" if not floor else listed,
        )
    if floor and release < floor:
        raise refuse(f"the project's stable ABI starts at Torch {floor}", listed)
    if not floor and not _in_range(release, project.framework.minver, project.framework.maxver):
        raise refuse(f"[torch] minver and maxver rule out Torch {release}", listed)
    if variant.cuda and variant.cuda not in _cuda_releases_of(project, [variant.cuda]):
        raise refuse(f"[general.cuda] minver and maxver or a kernel's cuda-minver rule out CUDA {variant.cuda}", listed)
