"""Writes a new lock from the index: which versions, and which bytes of their wheels.

- Torch: the newest patch of each release, and of its wheels the newest build for the oldest CPython. The headers are
  the same in the wheels of every CPython.
- CUDA: the newest patch of each release of `cuda-toolkit`, whose metadata pins the versions of the parts. cuDNN is not
  among them: of the versions that the Torch releases require, the oldest, so that a kernel does not take for granted
  what the others lack.
- clang: the newest patch of each release that the matrix names for it.
- Header libraries: the files that `dependencies.toml` names.
- Components: the files that the tables of back ends name.

Only the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernel_builder.backends.cuda import ClangReleases
from kernel_builder.config.variant import PLATFORMS, Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain import dependencies, pins, tree_files, trees
from kernel_builder.toolchain.components import Component
from kernel_builder.toolchain.dependencies import Dependency, DependencyFile
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import ClangPin, ComponentPin, CudaPin, DependencyPin, Lock, PinnedFile, TorchPin
from kernel_builder.toolchain.tools import Subset
from kernel_format.errors import ToolchainError
from kernel_format.files import temporary_directory

CUDA_SET = "cuda-toolkit"
CUDA_PARTS = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")
# What is taken of nvidia-nvvm: not libnvvm.so, since nvcc runs the program cicc instead.
_NVVM = ("include/", "nvvm/")
# Those whose headers Torch's own headers and CUTLASS include, and the few that kernels use besides.
CUDA_LIBRARIES = (
    "nvidia-cublas",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-profiler-api",
    "nvidia-cufft",
    "nvidia-curand",
    "nvidia-cusolver",
    "nvidia-cusparse",
    "nvidia-nvml-dev",
    "nvidia-nvtx",
)

# clang's own headers include one of cuRAND, which includes the others.
_OF_CURAND = ("include/curand.h", "include/curand_mtgp32.h", "include/curand_mtgp32_kernel.h")

ZIGLANG, CLANG_HEADERS = "ziglang", "clang-include-cleaner"

TORCH_PREFIX = "torch/include/"
# Everything, and the headers of the stable ABI with every header that they include.
TORCH_SUBSETS: Mapping[Subset, tuple[str, ...]] = {
    "stable": (
        "ATen/Config.h",
        "torch/csrc/inductor/aoti_torch/c/",
        "torch/csrc/inductor/aoti_torch/generated/",
        "torch/csrc/stable/",
        "torch/headeronly/",
    ),
    "full": ("",),
}


@dataclass(frozen=True, kw_only=True)
class ToPin:
    """What a lock is to have: releases, header libraries and components, and clang if its releases are given."""

    torch: Sequence[Release] = ()
    cuda: Sequence[Release] = ()
    platforms: Sequence[str] = PLATFORMS
    libraries: Iterable[Dependency] = ()
    clang: ClangReleases | None = None
    components: Iterable[Component] = ()


def resolve(index: Index, wanted: ToPin, progress: Progress) -> Lock:
    """Return the lock for what is wanted.

    A CUDA release whose compiler the index lacks is reported and left out. So is a header library without files.

    Raises:
        FetchError: If the index cannot be reached, or lacks a Torch release or a file of a header library.
        ToolchainError: If a file is not laid out as expected.
    """
    torches = {}
    for release in wanted.torch:
        torches[release] = _pin_torch(index, release, wanted.platforms)
        progress.say(f"Torch {release}: {torches[release].version}")
    cudas = {}
    for release in wanted.cuda:
        if (pinned := _pin_cuda(index, release, wanted.platforms, torches.values())) is None:
            progress.say(f"CUDA {release}: left out, the index has no complete compiler of it")
            continue
        progress.say(f"CUDA {release}: {pinned.version}")
        cudas[release] = pinned
    headers = {}
    for library in wanted.libraries:
        if not library.files:
            progress.say(f"{library.title}: left out, no index has it")
            continue
        headers[library.name] = _pin_dependency(index, library)
        progress.say(library.title)
    clang, platforms = wanted.clang, wanted.platforms
    pinned_clang = _pin_clang(index, clang, platforms, torches.values()) if clang else None
    if pinned_clang:
        progress.say(f"clang: {pinned_clang.version}, with CUDA {pinned_clang.cuda.version}")
    of_backends = {}
    for component in wanted.components:
        files = tuple(_pin_files(index, component.files))
        of_backends[component.name] = ComponentPin(component.name, component.title, component.version, files)
        progress.say(f"{component.title}: {component.version}")
    return Lock(cudas, torches, headers, pinned_clang, of_backends)


def _pin_cuda(index: Index, release: Release, platforms: Sequence[str], torches: Iterable[TorchPin]) -> CudaPin | None:
    version, wanted = _parts(index, release)
    if not wanted.keys() >= set(CUDA_PARTS):
        return None
    pinned, libraries = {}, {}
    prefix = f"nvidia/cu{release.major}/"
    for platform in platforms:
        pinned[platform] = tuple(
            pins.pin_part(
                index, project, wanted[project], platform, prefix, _NVVM if project == "nvidia-nvvm" else ("",)
            )
            for project in CUDA_PARTS
        )
        libraries[platform] = tuple(
            pins.pin_part(index, project, wanted[project], platform, prefix, ("include/",))
            for project in CUDA_LIBRARIES
            if project in wanted
        ) + _pin_cudnn(index, release, platform, torches)
    return CudaPin(release, version, pinned, libraries)


def _parts(index: Index, release: Release) -> tuple[str, dict[str, SpecifierSet]]:
    """Return the newest version of a CUDA release, and the versions of its parts; no parts if the index has none."""
    sets = pins.of_release(index.packages(CUDA_SET), release)
    if not sets:
        return "", {}
    chosen = max(sets, key=pins.version_of)
    wanted: dict[str, SpecifierSet] = {}
    for requirement in pins.requirements_of(index, chosen):
        wanted[requirement.name] = wanted.get(requirement.name, SpecifierSet()) & requirement.specifier
    return str(pins.version_of(chosen)), wanted


def _pin_clang(
    index: Index, releases: ClangReleases, platforms: Sequence[str], torches: Iterable[TorchPin]
) -> ClangPin:
    """Pin clang and the parts of its CUDA release. Each wheel of CUDA 12 has a directory of its own."""
    programs = {
        project: max(map(pins.version_of, pins.of_release(index.packages(project), release)), default=Version("0"))
        for project, release in ((ZIGLANG, releases.ziglang), (CLANG_HEADERS, releases.headers))
    }
    resources = f"clang_include_cleaner/data/lib/clang/{releases.headers.major}/"
    version, wanted = _parts(index, releases.cuda)
    _, of_fatbinary = _parts(index, releases.fatbinary)
    compilers, toolkit, libraries = {}, {}, {}
    for platform in platforms:

        def part(project: str, *take: str, platform: str = platform) -> PinnedFile:
            suffix = f"-cu{releases.cuda.major}"
            prefix = f"nvidia/{project.removeprefix('nvidia-').replace('-', '_')}/"
            return pins.pin_part(index, project + suffix, wanted[project + suffix], platform, prefix, take)

        compilers[platform] = tuple(
            pins.pin_part(index, project, SpecifierSet(f"=={programs[project]}"), platform, prefix, take)
            for project, prefix, take in (
                (ZIGLANG, "ziglang/", (trees.ZIG,)),
                (CLANG_HEADERS, resources, ("include/",)),
            )
        )
        nvcc = "nvidia-cuda-nvcc"
        toolkit[platform] = (
            part("nvidia-cuda-cccl", "include/"),
            part(nvcc, "bin/", "include/", "nvvm/libdevice/"),
            part("nvidia-cuda-runtime", "include/"),
            part("nvidia-curand", *_OF_CURAND),
            pins.pin_part(
                index, nvcc, of_fatbinary[nvcc], platform, f"nvidia/cu{releases.fatbinary.major}/", ("bin/fatbinary",)
            ),
        )
        libraries[platform] = tuple(
            part(project, "include/") for project in CUDA_LIBRARIES if f"{project}-cu{releases.cuda.major}" in wanted
        ) + _pin_cudnn(index, releases.cuda, platform, torches)
    return ClangPin(str(programs[CLANG_HEADERS]), compilers, CudaPin(releases.cuda, version, toolkit, libraries))


def _pin_cudnn(index: Index, release: Release, platform: str, torches: Iterable[TorchPin]) -> tuple[PinnedFile, ...]:
    """Pin the oldest cuDNN that a Torch release requires for this major version of CUDA; nothing if none does."""
    project = f"nvidia-cudnn-cu{release.major}"
    required = []
    for torch in torches:
        if platform in torch.platforms:
            file = torch.platforms[platform]["full"].file
            wheel = next(package for package in index.packages("torch") if package.filename == file)
            required += [
                Version(specifier.version)
                for requirement in pins.requirements_of(index, wheel)
                if requirement.name == project
                for specifier in requirement.specifier
                if specifier.operator == "=="
            ]
    if not required:
        return ()
    return (
        pins.pin_part(index, project, SpecifierSet(f"=={min(required)}"), platform, "nvidia/cudnn/", ("include/",)),
    )


def _pin_torch(index: Index, release: Release, platforms: Sequence[str]) -> TorchPin:
    newest = max(map(pins.version_of, pins.of_release(index.packages("torch"), release)), default=None)
    pinned = {}
    for platform in platforms:
        offered = [p for p in pins.for_platform(index.packages("torch"), platform) if pins.version_of(p) == newest]
        if not offered:
            raise pins.lacks(f"torch {release} for {platform}", index)
        parts = pins.pin_wheel(index, max(offered, key=pins.preference), TORCH_PREFIX, TORCH_SUBSETS.values())
        pinned[platform] = dict(zip(TORCH_SUBSETS, parts, strict=True))
    return TorchPin(release, str(newest), pinned)


def _pin_dependency(index: Index, library: Dependency) -> DependencyPin:
    """Pin the files of a header library, and check that they state its version."""
    pinned = list(_pin_files(index, library.files))
    with temporary_directory() as directory:
        for pin in pinned:
            package = next(candidate for candidate in index.packages(pin.project) if candidate.filename == pin.file)
            slices = [memoryview(index.read(package, start, stop)) for start, stop in pin.ranges]
            tree_files.unpack(pin, slices, directory)
        stated = dependencies.stated_version(directory)
    if stated != library.version:
        raise ToolchainError(
            f"states version {stated}, expected {library.version}", where=f"{library.name} in dependencies.toml"
        )
    return DependencyPin(library.name, library.version, library.license, tuple(pinned))


def _pin_files(index: Index, files: Iterable[DependencyFile]) -> Iterator[PinnedFile]:
    for wanted in files:
        package = next(
            (candidate for candidate in index.packages(wanted.project) if candidate.filename == wanted.file), None
        )
        if package is None:
            raise pins.lacks(wanted.file, index)
        if package.package_type == "sdist":
            yield pins.pin_sdist(index, package, wanted)
        else:
            yield from pins.pin_wheel(index, package, wanted.prefix, [wanted.take])
