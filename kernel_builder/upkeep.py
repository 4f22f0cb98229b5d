"""Brings a checkout's tables up to date with the package index: the matrix, the lock, Torch's exports and libraries.

A new Torch release changes four files, which `FILES` lists. They change as text, so that comments and order stay.
Nothing is written unless all of them can be.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pypi_simple import DistributionPackage

from kernel_builder import elf, toml_file
from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.progress import Progress, Silent
from kernel_builder.toolchain import Toolchains, components, lock
from kernel_builder.toolchain.components import TORCH_PREFIX, Component
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import (
    for_platform,
    of_release,
    preference,
    requirements_of,
    resolve,
    version_of,
)
from kernel_format.errors import ConfigError, ToolchainError
from kernel_format.files import temporary_directory

MATRIX, LOCK = "kernel_builder/config/matrix.toml", "kernel_builder/toolchain/lock.json"
SHIMS, CUDA = "kernel_builder/checks/torch_shims.toml", "kernel_builder/backends/cuda/cuda.toml"
FILES = (MATRIX, LOCK, SHIMS, CUDA)
# The platform whose wheels are read; those of the others have the same libraries and headers.
_READ = "x86_64-linux"
_LIBRARIES = "torch/lib/"
# This header refuses older C++ standards than the others need.
_ALL = f"{TORCH_PREFIX}torch/csrc/api/include/torch/all.h"
_SHIM_HEADERS = ("inductor/aoti_torch/c/shim.h", "inductor/aoti_torch/generated/c_shim_aten.h", "stable/c/shim.h")


@dataclass(frozen=True)
class Update:
    """The new content of a checkout's files.

    Attributes:
        changes: The new releases, and the files that change, a line each.
        files: Path in the checkout -> text, of those that change.
    """

    changes: tuple[str, ...]
    files: Mapping[str, str]

    def write(self, root: Path) -> None:
        """Write the files."""
        for name, text in self.files.items():
            (root / name).write_text(text, encoding="utf-8")


def find(
    root: Path,
    others: Iterable[Component],
    *,
    index_url: str | None,
    torch_index: str,
    progress: Progress,
    cache: Path | None = None,
) -> Update:
    """Return the changes that bring a checkout up to date with the package index.

    Args:
        root: The checkout.
        others: The components to pin besides Torch's headers and those of CUDA's table.
        index_url: The package index; None for the one that pip or uv is set to use.
        torch_index: The address of the index with Torch's builds for every CUDA release.
        cache: The builder's cache; None for the user's.
    """
    texts = {name: _text(root / name) for name in FILES}
    known = sorted(map(Release.parse, toml_file.parse(texts[MATRIX], MATRIX)["torch"]))
    known_cuda = sorted(map(Release.parse, toml_file.parse(texts[CUDA], CUDA)["release"]))
    index = Index(index_url)
    published = _published(known[-1], index, Index(torch_index))
    updated = dict(texts)
    new_cuda, changes = [], []
    for release in sorted({cuda for of_torch in published.values() for cuda in of_torch} - {*known_cuda}):
        table = _with_cuda_components(updated[CUDA], known_cuda[-1], release)
        compiler = next(component for component in _of_cuda(table) if component.name == f"cuda-{release}")
        try:
            resolve(index, [compiler], Silent())
        except ToolchainError:
            changes.append(f"CUDA {release}: the index has no complete compiler of it, so it is not in the matrix")
            continue
        updated[CUDA] = table
        new_cuda.append(release)
    torches = components.of_torch([*known, *published])
    pinned = resolve(index, [*torches, *_of_cuda(updated[CUDA]), *others], progress)
    updated[LOCK] = lock.dumps(pinned)
    toolchains = Toolchains(cache=cache, index_url=index_url, pinned=pinned, progress=progress)
    for release in new_cuda:
        capabilities = toolkits.toolkit(toolchains, release).capabilities
        entry = f'\n[release."{release}"]\ncapabilities = {_quoted(capabilities)}\n'
        updated[CUDA] = _after_block(updated[CUDA], f'[release."{known_cuda[-1]}"]', entry)
        known_cuda.append(release)
        changes.append(f"CUDA {release}, for {', '.join(capabilities)}")
    last = known[-1]
    for torch, of_torch in published.items():
        wheel = _newest_wheel(index, torch)
        cxx = _cxx_standard(index, wheel)
        standard = f"cxx = {cxx}\n" if cxx != 17 else ""
        updated[MATRIX] = _after_block(updated[MATRIX], f'[torch."{last}"]', f'\n[torch."{torch}"]\n{standard}')
        releases = f"releases = {_quoted(release for release in of_torch if release in known_cuda)}"
        entry = f'\n[torch."{torch}"]\n{releases}\npypi = "{_own_cuda(index, wheel)}"\n'
        updated[CUDA] = _after_block(updated[CUDA], f'[torch."{last}"]', entry)
        updated[SHIMS] = _with_shims(updated[SHIMS], torch, toolchains)
        progress.say(f"Torch {torch}: reading the libraries of libtorch_cuda.so")
        before, needed = (_needed_libraries(index, release) for release in (last, torch))
        updated[CUDA] = _with_libraries(updated[CUDA], last, before, torch, needed)
        last = torch
        changes.append(f"Torch {torch} for CUDA {', '.join(map(str, of_torch))}, with C++{cxx}")
    changed = {name: text for name, text in updated.items() if text != texts[name]}
    return Update((*changes, *(f"`{name}` changes" for name in changed)), changed)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(file), hint="name a checkout of kernel-builder's repository"
        ) from error


def _of_cuda(table: str) -> list[Component]:
    return list(components.in_table(toml_file.parse(table, CUDA)))


def _published(newest: Release, index: Index, builds: Index) -> dict[Release, list[Release]]:
    """Return the final releases of Torch after one -> the CUDA releases that they are published for, ascending."""
    wheels = for_platform(index.packages("torch"), _READ)
    versions = [version for version in map(version_of, wheels) if not version.is_prerelease]
    releases = sorted({Release(*version.release[:2]) for version in versions})
    published = {}
    for release in (release for release in releases if release > newest):
        of_builds = for_platform(of_release(builds.packages("torch"), release), _READ)
        local = (re.fullmatch(r"cu(\d\d)(\d+)", version_of(package).local or "") for package in of_builds)
        published[release] = sorted({Release(int(match[1]), int(match[2])) for match in local if match})
    return published


def _newest_wheel(index: Index, release: Release) -> DistributionPackage:
    """Return the wheel of a Torch release that the lock"""
    wheels = for_platform(of_release(index.packages("torch"), release), _READ)
    return max(wheels, key=preference)


def _own_cuda(index: Index, wheel: DistributionPackage) -> Release:
    """Return the CUDA release of Torch's build on the package index."""
    for requirement in requirements_of(index, wheel):
        if requirement.name == "cuda-toolkit" or re.fullmatch(r"nvidia-cuda-runtime-cu\d+", requirement.name):
            for specifier in requirement.specifier:
                return Release(*map(int, specifier.version.split(".")[:2]))
    raise _unknown(wheel, "requires neither cuda-toolkit nor the CUDA runtime")


def _cxx_standard(index: Index, wheel: DistributionPackage) -> int:
    with index.open(wheel) as archive:
        match = re.search(r"__cplusplus < 20(\d\d)\d\dL", archive.read(_ALL).decode("utf-8", "replace"))
    if not match:
        raise _unknown(wheel, f"{_ALL} does not state its C++ standard")
    return int(match[1])


def _unknown(wheel: DistributionPackage, message: str) -> ToolchainError:
    return ToolchainError(message, where=wheel.filename, hint="add the release to matrix.toml manually")


def _needed_libraries(index: Index, release: Release) -> frozenset[str]:
    """Return the outside libraries that libtorch_cuda.so and its libraries in the wheel load, such as `cublas`.

    Reads some 500 MB of the wheel.
    """
    needs: dict[str, tuple[str, ...]] = {}
    with index.open(_newest_wheel(index, release)) as archive, temporary_directory() as directory:
        own = {PurePosixPath(name).name for name in archive.namelist() if name.startswith(_LIBRARIES)}
        waiting = ["libtorch_cuda.so"]
        while waiting:
            library = Path(directory, name := waiting.pop())
            with archive.open(_LIBRARIES + name) as packed, library.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            needs[name] = elf.read(library).needed
            library.unlink()
            waiting += [need for need in needs[name] if need in own and need not in needs and need not in waiting]
    names = (re.fullmatch(r"lib(\w+)\.so[.\d]*", name) for of in needs.values() for name in of if name not in own)
    return frozenset(match[1] for match in names if match)


def exported(include: Path, release: Release, *, cuda: bool, cxx: str = "g++") -> set[str]:
    """Return the C functions that headers declare for the stable ABI of a release, with those of CUDA or without.

    Args:
        include: Torch's include directory, of this release or a later one.
        cxx: The g++ that preprocesses them.
    """
    target = f"-DTORCH_TARGET_VERSION=(({release.major}ULL<<56)|({release.minor}ULL<<48))"
    command = [cxx, "-E", "-P", "-std=c++20", f"-I{include}", target, *(["-DUSE_CUDA"] if cuda else []), "-x", "c++"]
    source = "".join(f"#include <torch/csrc/{header}>\n" for header in _SHIM_HEADERS)
    text = subprocess.run([*command, "-"], input=source, capture_output=True, text=True, check=True).stdout
    names = re.findall(r'__visibility__\("default"\)\)\)[^;(]*?\b(\w+)\s*\(', text)
    return {name for name in names if "_mps_" not in name}


def _with_shims(table: str, release: Release, toolchains: Toolchains) -> str:
    """Return the table of the stable ABI with the additional functions in the headers of a release."""
    parsed = toml_file.parse(table, SHIMS)
    known = {name for names in parsed["release"].values() for name in names}
    include, cxx = toolchains.torch(release, "stable", _READ).include[0], str(toolchains.host().path)
    declared = exported(include, release, cuda=True, cxx=cxx) - known
    if not declared:
        return table
    of_cuda = {*parsed["library"]["cuda"], *(declared - exported(include, release, cuda=False, cxx=cxx))}
    newest = max(parsed["release"], key=Release.parse)
    table = _after_block(table, f'"{newest}" = [', f'\n"{release}" = {_lines(declared)}\n')
    return re.sub(r"(?ms)^cuda = \[.*?^\]", lambda _: f"cuda = {_lines(of_cuda)}", table)


def _with_cuda_components(table: str, before: Release, release: Release) -> str:
    """Return the table of CUDA with the components of a release, which have the same files as those of another."""
    names = (f"cuda-{before}", f"cuda-libraries-{before}")
    blocks = [re.search(rf'(?ms)^\[component\."{re.escape(name)}"\]\n.*?\n\]\n', table) for name in names]
    addition = "".join("\n" + block[0].replace(str(before), str(release)) for block in blocks if block)
    return _after_block(table, f'[component."{names[-1]}"]', addition)


def _with_libraries(table: str, last: Release, before: frozenset[str], release: Release, needed: frozenset[str]) -> str:
    """Return the table of CUDA with the changes of the libraries from the Torch release `last` to the next one."""
    known = toml_file.parse(table, CUDA)["library"]
    for name in sorted(before - needed):
        if name in known and known[name].get("loaded", True) and "until" not in known[name]:
            table = _after_block(table, f"[library.{name}]", f'until = "{last}"\n')
    new = sorted(needed - before - set(known))
    return table + "".join(f'\n[library.{name}]\nsince = "{release}"\n' for name in new)


def _after_block(text: str, first: str, addition: str) -> str:
    """Insert whole lines after a block: the lines from the one that begins with `first` to the next empty one."""
    end = text.find("\n\n", text.index(f"\n{first}") + 1)
    at = len(text) if end < 0 else end + 1
    return text[:at] + addition + text[at:]


def _quoted(names: Iterable[object]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _lines(names: Iterable[str]) -> str:
    return "[\n" + "".join(f'    "{name}",\n' for name in sorted(names)) + "]"
