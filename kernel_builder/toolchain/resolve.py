"""Writes a new lock from the index: which versions, and which bytes of their wheels.

- Torch: the newest patch of each release, and of its wheels the newest build for the oldest CPython. The headers are
  the same in the wheels of every CPython.
- CUDA: the newest patch of each release of `cuda-toolkit`, whose metadata pins the versions of the parts. cuDNN is not
  among them: of the versions that the Torch releases require, the oldest, so that a kernel does not take for granted
  what the others lack.
- Header libraries: the files that `dependencies.toml` names.

Only the byte ranges that a build would fetch are downloaded, and each wheel's zip directory.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kernel_builder.config.variant import Release
from kernel_builder.errors import FetchError, ToolchainError
from kernel_builder.progress import Progress
from kernel_builder.toolchain import dependencies, sdists, trees, wheels
from kernel_builder.toolchain.dependencies import Dependency, DependencyFile
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import CudaPin, DependencyPin, Lock, PinnedFile, TorchPin
from kernel_builder.toolchain.tools import Subset

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

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

# Two ranges closer than this many bytes are fetched as one: a request costs more than the bytes between.
_NEAR = 32_768


def resolve(
    index: Index,
    torch: Sequence[Release],
    cuda: Sequence[Release],
    platforms: Sequence[str],
    progress: Progress,
    libraries: Iterable[Dependency] = (),
) -> Lock:
    """Return the lock for these releases and header libraries.

    A CUDA release whose compiler the index lacks is reported and left out. So is a header library without files.

    Raises:
        FetchError: If the index cannot be reached, or lacks a Torch release or a file of a header library.
        ToolchainError: If a file is not laid out as expected.
    """
    torches = {}
    for release in torch:
        torches[release] = _pin_torch(index, release, platforms)
        progress.say(f"Torch {release}: {torches[release].version}")
    cudas = {}
    for release in cuda:
        if (pinned := _pin_cuda(index, release, platforms, torches.values())) is None:
            progress.say(f"CUDA {release}: left out, the index has no complete compiler of it")
            continue
        progress.say(f"CUDA {release}: {pinned.version}")
        cudas[release] = pinned
    pins = {}
    for library in libraries:
        if not library.files:
            progress.say(f"{library.title}: left out, no index has it")
            continue
        pins[library.name] = _pin_dependency(index, library)
        progress.say(library.title)
    return Lock(cudas, torches, pins)


def _pin_cuda(index: Index, release: Release, platforms: Sequence[str], torches: Iterable[TorchPin]) -> CudaPin | None:
    sets = _of_release(index.packages(CUDA_SET), release)
    if not sets:
        return None
    chosen = max(sets, key=_version)
    wanted: dict[str, SpecifierSet] = {}
    for requirement in _requirements(index, chosen):
        if requirement.name in (*CUDA_PARTS, *CUDA_LIBRARIES):
            wanted[requirement.name] = wanted.get(requirement.name, SpecifierSet()) & requirement.specifier
    if not wanted.keys() >= set(CUDA_PARTS):
        return None
    pinned, libraries = {}, {}
    prefix = f"nvidia/cu{release.major}/"
    for platform in platforms:
        pinned[platform] = tuple(
            _pin_part(index, project, wanted[project], platform, prefix, _NVVM if project == "nvidia-nvvm" else ("",))
            for project in CUDA_PARTS
        )
        libraries[platform] = tuple(
            _pin_part(index, project, wanted[project], platform, prefix, ("include/",))
            for project in CUDA_LIBRARIES
            if project in wanted
        ) + _pin_cudnn(index, release, platform, torches)
    return CudaPin(release, str(_version(chosen)), pinned, libraries)


def _pin_part(
    index: Index, project: str, versions: SpecifierSet, platform: str, prefix: str, take: tuple[str, ...]
) -> PinnedFile:
    offered = [package for package in _for_platform(index.packages(project), platform) if _version(package) in versions]
    if not offered:
        raise _lacks(f"{project}{versions} for {platform}", index)
    return _pin_wheel(index, max(offered, key=_preference), prefix, [take])[0]


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
                for requirement in _requirements(index, wheel)
                if requirement.name == project
                for specifier in requirement.specifier
                if specifier.operator == "=="
            ]
    if not required:
        return ()
    return (_pin_part(index, project, SpecifierSet(f"=={min(required)}"), platform, "nvidia/cudnn/", ("include/",)),)


def _requirements(index: Index, wheel: DistributionPackage) -> list[Requirement]:
    with index.open(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=False).requires_dist or []


def _pin_torch(index: Index, release: Release, platforms: Sequence[str]) -> TorchPin:
    newest = max(map(_version, _of_release(index.packages("torch"), release)), default=None)
    pinned = {}
    for platform in platforms:
        offered = [p for p in _for_platform(index.packages("torch"), platform) if _version(p) == newest]
        if not offered:
            raise _lacks(f"torch {release} for {platform}", index)
        parts = _pin_wheel(index, max(offered, key=_preference), TORCH_PREFIX, TORCH_SUBSETS.values())
        pinned[platform] = dict(zip(TORCH_SUBSETS, parts, strict=True))
    return TorchPin(release, str(newest), pinned)


def _pin_dependency(index: Index, library: Dependency) -> DependencyPin:
    """Pin the files of a header library, and check that they state its version."""
    pinned = []
    for wanted in library.files:
        package = next((one for one in index.packages(wanted.project) if one.filename == wanted.file), None)
        if package is None:
            raise _lacks(wanted.file, index)
        if package.package_type == "sdist":
            pinned.append(_pin_sdist(index, package, wanted))
        else:
            pinned += _pin_wheel(index, package, wanted.prefix, [wanted.take])
    with tempfile.TemporaryDirectory() as directory:
        for pin in pinned:
            package = next(one for one in index.packages(pin.project) if one.filename == pin.file)
            slices = [memoryview(index.read(package, start, stop)) for start, stop in pin.ranges]
            trees.unpack(pin, slices, Path(directory))
        stated = dependencies.stated_version(Path(directory))
    if stated != library.version:
        raise ToolchainError(
            f"states version {stated}, expected {library.version}", where=f"{library.name} in dependencies.toml"
        )
    return DependencyPin(library.name, library.version, library.license, tuple(pinned))


def _pin_sdist(index: Index, package: DistributionPackage, wanted: DependencyFile) -> PinnedFile:
    """Pin a source distribution, of which the whole is fetched."""
    data = index.read(package)
    sha256 = hashlib.sha256(data).hexdigest()
    files = sdists.checked(
        memoryview(data),
        package.digests.get("sha256", ""),
        wanted.prefix,
        lambda name: name.startswith(wanted.take),
    )
    return PinnedFile(
        project=canonicalize_name(package.project or ""),
        version=str(_version(package)),
        file=package.filename,
        size=len(data),
        sha256=sha256,
        record=None,
        ranges=((0, len(data)),),
        fetched=sha256,
        prefix=wanted.prefix,
        take=wanted.take,
        unpacked=sum(len(content) for _, content in files),
    )


def _version(package: DistributionPackage) -> Version:
    try:
        return Version(package.version or "")
    except InvalidVersion:
        return Version("0")


def _of_release(packages: Iterable[DistributionPackage], release: Release) -> list[DistributionPackage]:
    """Return the wheels of a release, without pre-releases and yanked files."""
    return [
        package
        for package in packages
        if package.package_type == "wheel"
        and not package.is_yanked
        and _version(package).release[:2] == release
        and not _version(package).is_prerelease
    ]


def _for_platform(packages: Iterable[DistributionPackage], platform: str) -> list[DistributionPackage]:
    machine = platform.partition("-")[0]
    return [
        package
        for package in packages
        if package.package_type == "wheel"
        and not package.is_yanked
        and any(
            tag.platform.startswith("manylinux") and tag.platform.endswith(f"_{machine}")
            for tag in parse_wheel_filename(package.filename)[3]
        )
    ]


def _preference(package: DistributionPackage) -> tuple[Version, bool, int, tuple[int, str] | tuple[()]]:
    """Sort key of wheels: version, then the oldest CPython without free threading, then build number."""
    _, version, build, tags = parse_wheel_filename(package.filename)
    tag = min(tags, key=str)
    digits = tag.interpreter.removeprefix("cp")
    minor = int(digits[1:]) if tag.interpreter.startswith("cp") and digits[1:].isdigit() else 0
    return version, not tag.abi.endswith("t"), -minor, build


def _pin_wheel(
    index: Index, package: DistributionPackage, prefix: str, parts: Iterable[tuple[str, ...]]
) -> list[PinnedFile]:
    """Pin parts of one wheel: for each, the files under `prefix` whose names begin with one of it, and `RECORD`."""
    name = package.filename
    with index.open(package) as archive:
        size = archive.size()
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        record_name = next((i.filename for i in infos if i.filename.endswith(".dist-info/RECORD")), None)
        if record_name is None or "sha256" not in package.digests:
            raise ToolchainError("has no RECORD, or the index states no SHA-256 of it", where=name)
        record = archive.read(record_name)
    hashes = wheels.parse_record(record.decode("utf-8"))
    pinned = []
    for take in parts:
        ranges: list[tuple[int, int]] = []
        unpacked = 0
        for info, end in zip(infos, ends, strict=True):
            inside = info.filename.removeprefix(prefix)
            kept = info.filename.startswith(prefix) and not info.is_dir() and inside.startswith(take)
            if not kept and info.filename != record_name:
                continue
            if info.flag_bits & 0x8 or (kept and info.filename not in hashes):
                raise ToolchainError(
                    f"{info.filename}: has no sizes before its content, or no hash in RECORD", where=name
                )
            unpacked += info.file_size if kept else 0
            start = info.header_offset
            if ranges and start - ranges[-1][1] < _NEAR:
                start = ranges.pop()[0]
            ranges.append((start, end))
        if not unpacked:
            raise ToolchainError(f"has none of the files expected under {prefix}", where=name)
        pinned.append(
            PinnedFile(
                project=canonicalize_name(package.project or ""),
                version=str(_version(package)),
                file=name,
                size=size,
                sha256=package.digests["sha256"],
                record=hashlib.sha256(record).hexdigest(),
                ranges=tuple(ranges),
                fetched=_hash_ranges(index, package, ranges),
                prefix=prefix,
                take=take,
                unpacked=unpacked,
            )
        )
    return pinned


def _hash_ranges(index: Index, package: DistributionPackage, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, stop in ranges:
        digest.update(index.read(package, start, stop))
    return digest.hexdigest()


def _lacks(wanted: str, index: Index) -> FetchError:
    return FetchError(
        "the index does not have it", where=f"{wanted} at {index.url}", hint="use another index (`--index-url`)"
    )
