"""Brings a checkout's tables up to date with the package index: the matrix, the lock, Torch's exports and libraries.

A new Torch release changes four files, which `FILES` lists. Nothing is written unless all of them can be.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.progress import Progress, Silent
from kernel_builder.toolchain import Toolchains, components, lock
from kernel_builder.toolchain.components import Component
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import Lock
from kernel_builder.toolchain.resolve import resolve
from kernel_builder.upkeep import shim_headers, table_text, torch_releases
from kernel_builder.upkeep.torch_releases import TorchRelease
from kernel_format.errors import ConfigError, ToolchainError

MATRIX, LOCK = "kernel_builder/config/matrix.toml", "kernel_builder/toolchain/lock.json"
SHIMS, CUDA = "kernel_builder/checks/torch_shims.toml", "kernel_builder/backends/cuda/cuda.toml"
FILES = (MATRIX, LOCK, SHIMS, CUDA)
# The platform whose wheels are read; those of the others have the same libraries and headers.
_READ = "x86_64-linux"


@dataclass(frozen=True)
class Update:
    """The new content of a checkout's files.

    Attributes:
        changes: The changes, a line each, as Markdown.
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
    new_torches = list(torch_releases.released_after(known[-1], index, Index(torch_index), _READ))
    updated = dict(texts)
    new_cuda, notes = [], []
    for release in sorted({release for torch in new_torches for release in torch.cuda} - {*known_cuda}):
        table = table_text.with_cuda_components(updated[CUDA], known_cuda[-1], release)
        compiler = next(component for component in _of_cuda(table) if component.name == f"cuda-{release}")
        try:
            resolve(index, [compiler], Silent())
        except ToolchainError:
            notes.append(f"CUDA {release}: the index has no complete compiler of it, so it is not in the matrix")
            continue
        updated[CUDA] = table
        new_cuda.append(release)
    torches = components.of_torch([*known, *(torch.release for torch in new_torches)])
    pinned = resolve(index, [*torches, *_of_cuda(updated[CUDA]), *others], progress)
    toolchains = Toolchains(cache=cache, index_url=index_url, pinned=pinned, progress=progress)
    for release in new_cuda:
        capabilities = toolkits.toolkit(toolchains, release).capabilities
        updated[CUDA] = table_text.with_cuda(updated[CUDA], known_cuda[-1], release, capabilities)
        known_cuda.append(release)
        notes.append(f"CUDA {release}, for {', '.join(capabilities)}")
    last = known[-1]
    for torch in new_torches:
        updated[MATRIX] = table_text.with_torch(updated[MATRIX], last, torch.release, _standard(torch))
        updated[CUDA] = table_text.with_torch(updated[CUDA], last, torch.release, _published(torch, known_cuda))
        updated[SHIMS] = _with_shims(updated[SHIMS], torch.release, toolchains)
        progress.say(f"Torch {torch.release}: reading the libraries of libtorch_cuda.so")
        needs = [torch_releases.needed_libraries(index, release, _READ) for release in (last, torch.release)]
        updated[CUDA] = table_text.with_libraries(updated[CUDA], last, needs[0], torch.release, needs[1])
        last = torch.release
        notes.append(f"Torch {torch.release} for CUDA {', '.join(map(str, torch.cuda))}, with C++{torch.cxx}")
    updated[LOCK] = lock.dumps(pinned)
    notes += _newer(lock.loads(texts[LOCK], LOCK), pinned)
    changed = {name: text for name, text in updated.items() if text != texts[name]}
    for name in (SHIMS, CUDA):
        if name in changed:
            notes += (f"`{name}`: `{line}`" for line in _added(texts[name], changed[name]))
    if LOCK in changed and not notes:
        notes.append("other files of the pinned versions")
    return Update(tuple(notes), changed)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(file), hint="name a checkout of kernel-builder's repository"
        ) from error


def _of_cuda(table: str) -> list[Component]:
    return list(components.in_table(toml_file.parse(table, CUDA)))


def _standard(torch: TorchRelease) -> Iterator[str]:
    """Yield the lines of a Torch release in the matrix."""
    if torch.cxx != 17:
        yield f"cxx = {torch.cxx}"


def _published(torch: TorchRelease, known_cuda: list[Release]) -> Iterator[str]:
    """Yield the lines of a Torch release in the table of CUDA."""
    yield f"releases = {table_text.quoted(release for release in torch.cuda if release in known_cuda)}"
    yield f'pypi = "{torch.pypi}"'


def _with_shims(table: str, release: Release, toolchains: Toolchains) -> str:
    """Return the table of the stable ABI with the additional functions in the headers of a release."""
    releases = toml_file.parse(table, SHIMS)["release"]
    known = {name for names in releases.values() for name in names}
    include = toolchains.torch(release, "stable", _READ).include[0]
    cxx = str(toolchains.host().path)
    declared = shim_headers.exported(include, release, cuda=True, cxx=cxx)
    if not declared - known:
        return table
    of_cuda = declared - shim_headers.exported(include, release, cuda=False, cxx=cxx) - known
    newest = max(releases, key=Release.parse)
    return table_text.with_shims(table, newest, release, declared - known, of_cuda)


def _newer(old: Lock, new: Lock) -> Iterator[str]:
    """Yield the version changes between two locks, a line each."""
    before = _versions(old)
    for name, version in _versions(new).items():
        if before.get(name) != version:
            yield f"{name} {before[name]} → {version}" if name in before else f"{name} {version} is pinned"


def _versions(pinned: Lock) -> dict[str, str]:
    """Return the version of everything that a lock pins."""
    versions = {}
    for pin in pinned.values():
        title = pin.title.partition(" headers (")[0]  # both subsets of Torch's headers have one version
        versions[f"{title}:"] = pin.version
        for files in pin.platforms.values():
            if len(files) > 1:
                versions |= {f"{title}: {file.project}": file.version for file in files}
    return versions


def _added(old: str, new: str) -> Iterator[str]:
    """Yield the lines that are new, without their layout."""
    for line in difflib.ndiff(old.splitlines(), new.splitlines()):
        if line.startswith("+ ") and line[2:].strip():
            yield line[2:].strip()
