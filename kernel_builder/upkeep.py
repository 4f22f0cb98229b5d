"""Brings a checkout's tables up to date with the package index: the matrix, the lock and Torch's exports.

A new Torch release changes four files, which `FILES` lists. They change as text, so that comments and order stay.
Nothing is written unless all of them can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.config.variant import Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain import Toolchains, components, lock
from kernel_builder.toolchain.components import TORCH_PREFIX, Component
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import for_platform, of_release, preference, resolve, version_of
from kernel_format.errors import ConfigError, ToolchainError
from kernel_sandbox.programs import run_program

MATRIX, LOCK = "kernel_builder/config/matrix.toml", "kernel_builder/toolchain/lock.json"
SHIMS, CUDA = "kernel_builder/checks/torch_shims.toml", "kernel_builder/backends/cuda/cuda.toml"
FILES = (MATRIX, LOCK, SHIMS, CUDA)
# The platform whose wheels are read; those of the others have the same libraries and headers.
_READ = "x86_64-linux"
# This header refuses older C++ standards than the others need.
_ALL = f"{TORCH_PREFIX}torch/csrc/api/include/torch/all.h"
_SHIM_HEADERS = ("inductor/aoti_torch/c/shim.h", "inductor/aoti_torch/generated/c_shim_aten.h", "stable/c/shim.h")


def find(
    root: Path,
    others: Iterable[Component],
    *,
    index_url: str | None,
    torch_index: str,
    progress: Progress,
    cache: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the new releases and changed files as lines, and the files: path in the checkout -> new text.

    Args:
        others: The components to pin besides Torch's headers.
        index_url: The package index; None for the one that pip or uv is set to use.
        torch_index: The address of the index with Torch's builds for every CUDA release.
    """
    texts = {name: _text(root / name) for name in FILES}
    known = sorted(map(Release.parse, toml_file.parse(texts[MATRIX], MATRIX)["torch"]))
    known_cuda = sorted(map(Release.parse, toml_file.parse(texts[CUDA], CUDA)["release"]))
    index = Index(index_url)
    published = _published(known[-1], index, Index(torch_index))
    pinned = resolve(index, [*components.of_torch([*known, *published]), *others], progress)
    toolchains = Toolchains(cache=cache, index_url=index_url, pinned=pinned, progress=progress)
    updated = {**texts, LOCK: lock.dumps(pinned)}
    changes = []
    last = known[-1]
    for torch, of_torch in published.items():
        cxx = _cxx_standard(index, torch)
        standard = f"cxx = {cxx}\n" if cxx != 17 else ""
        updated[MATRIX] = _after_block(updated[MATRIX], f'[torch."{last}"]', f'\n[torch."{torch}"]\n{standard}')
        releases = ", ".join(f'"{release}"' for release in of_torch if release in known_cuda)
        entry = f'\n[torch."{torch}"]\nreleases = [{releases}]\n'
        updated[CUDA] = _after_block(updated[CUDA], f'[torch."{last}"]', entry)
        updated[SHIMS] = _with_shims(updated[SHIMS], torch, toolchains)
        last = torch
        changes.append(
            f"Torch {torch} for CUDA {', '.join(map(str, of_torch))}, with C++{cxx}. Compare the libraries that its "
            f"libtorch_cuda.so needs with the tables [library] of `{CUDA}`"
        )
    for release in sorted({cuda for of_torch in published.values() for cuda in of_torch} - {*known_cuda}):
        changes.append(f"CUDA {release} is not in `{CUDA}`: add its components, capabilities and Torch releases there")
    changed = {name: text for name, text in updated.items() if text != texts[name]}
    return [*changes, *(f"`{name}` changes" for name in changed)], changed


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(file), hint="name a checkout of kernel-builder's repository"
        ) from error


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


def _cxx_standard(index: Index, release: Release) -> int:
    """Return the C++ standard that the headers of a Torch release need."""
    wheel = max(for_platform(of_release(index.packages("torch"), release), _READ), key=preference)
    with index.open(wheel) as archive:
        match = re.search(r"__cplusplus < 20(\d\d)\d\dL", archive.read(_ALL).decode("utf-8", "replace"))
    if not match:
        raise ToolchainError(
            f"{_ALL} does not state its C++ standard",
            where=wheel.filename,
            hint="add the release to matrix.toml manually",
        )
    return int(match[1])


def exported(include: Path, release: Release, *, cuda: bool, cxx: str = "g++") -> set[str]:
    """Return the C functions that headers declare for the stable ABI of a release, with those of CUDA or without.

    `include` is Torch's include directory, of this release or a later one.
    """
    target = f"-DTORCH_TARGET_VERSION=(({release.major}ULL<<56)|({release.minor}ULL<<48))"
    command = [cxx, "-E", "-P", "-std=c++20", f"-I{include}", target, *(["-DUSE_CUDA"] if cuda else []), "-x", "c++"]
    source = "".join(f"#include <torch/csrc/{header}>\n" for header in _SHIM_HEADERS)
    done = run_program(*command, "-", stdin=source.encode())
    done.check_returncode()
    names = re.findall(r'__visibility__\("default"\)\)\)[^;(]*?\b(\w+)\s*\(', done.stdout.decode())
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


def _after_block(text: str, first: str, addition: str) -> str:
    """Insert whole lines after a block: the lines from the one that begins with `first` to the next empty one."""
    end = text.find("\n\n", text.index(f"\n{first}") + 1)
    at = len(text) if end < 0 else end + 1
    return text[:at] + addition + text[at:]


def _lines(names: Iterable[str]) -> str:
    return "[\n" + "".join(f'    "{name}",\n' for name in sorted(names)) + "]"
