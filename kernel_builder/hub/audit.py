"""Describes published kernels without running them: variants, device code, requirements, ops, origin and findings."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder import backends, checks, elf
from kernel_builder.backends import DeviceCode
from kernel_builder.checks import fit
from kernel_builder.checks.binaries import architectures, oldest_python
from kernel_builder.checks.findings import CheckReport, Finding
from kernel_builder.checks.symbols import library_of
from kernel_builder.demangle import demangle
from kernel_builder.hub import card
from kernel_builder.hub.content import RemoteFile
from kernel_builder.hub.packages import HubPackage
from kernel_builder.hub.partial_download import SMALL, download, package_files
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.hub.verification import find_revision, signature_here
from kernel_builder.limits import within_limits
from kernel_format.errors import CheckError, PackageError, VariantError
from kernel_format.files import file_digest, temporary_directory
from kernel_format.metadata import PackageMetadata
from kernel_format.signatures import read_signers
from kernel_format.tree_digest import SIGNATURE
from kernel_format.variant import parse

# Of a partly downloaded package, these need whole files.
_WHOLE_FILES = frozenset({"digest", "load", "ops"})
_FAKE = re.compile(r"""register_fake\(\s*(?:add_op_namespace_prefix\(\s*)?f?["'](?:[^"']*::)?(\w+)""")
_MANGLED = re.compile(rb"(?<=\0)_Z\w+(?=\0)")  # the name of a kernel or a variable that host code registers
_UNCHANGED = "load no package that differs from its digest; ask the publisher"


@dataclass(frozen=True)
class AuditedVariant:
    """The result for one variant.

    Attributes:
        requires: Its requirements, such as `torch` and `glibc`, as text.
        changes: The changes of this environment that make it load; empty if it loads.
        device_code: For each architecture the bytes of `sass` and of `ptx`.
        kernels: The device functions by declaration, with their architectures; no architectures where the code is
            compressed, so that only the library's are known.
        symbols: The number of undefined symbols by library.
        ops: The schemas of the ops, and whether a Python file registers a `fake`.
        rebuild: Whether `verify --source` can rebuild it, or the reason why not.
    """

    variant: str
    size: int
    requires: Mapping[str, str]
    changes: tuple[str, ...]
    archs: tuple[str, ...]
    device_code: Mapping[str, Mapping[str, int]]
    kernels: Mapping[str, tuple[str, ...]]
    libraries: tuple[str, ...]
    symbols: Mapping[str, int]
    ops: tuple[Mapping[str, Any], ...]
    signature: str
    provenance: Mapping[str, Mapping[str, Any]]
    rebuild: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Audit:
    """The result for one kernel.

    Attributes:
        name: The directory, or the repository with its revision.
        downloaded: Bytes; 0 for a directory.
        environment: This environment, in one line.
        client: The releases of the client that the installed transformers accepts, if it does not accept this one.
        loads: The variant that the client selects here; None if there is none.
        api_changes: The differences in API from the earlier version.
    """

    name: str
    downloaded: int
    environment: str
    client: str | None
    loads: str | None
    variants: tuple[AuditedVariant, ...]
    api_changes: tuple[str, ...] | None = None


def audit(
    name: str, *, since: str | None = None, load: bool = False, signers: Sequence[str] = (), endpoint: str | None = None
) -> Audit:
    """Read the packages of a kernel, and describe them.

    Args:
        name: `ORG/NAME` for the newest version, `ORG/NAME@REVISION`, or a directory: a project or a `build` of one.
        since: An earlier revision of the repository, or another directory, to compare the API with.
        load: Download everything, and run the checks that load the packages, in a sandbox.
        signers: Trusted signers, as for `verify`.
        endpoint: The address of the Hub, as for `verify`.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
        CheckError: If there are no packages, or reading them takes too much time or memory.
    """
    trusted = read_signers(signers)
    environment = fit.this_environment()
    with ExitStack() as stack:
        opened = _open(name, stack, whole=load, endpoint=endpoint)
        packages = [HubPackage(directory) for directory in opened.packages]
        repo_id = opened.repository.repo_id if opened.repository else None
        names = [name for name in checks.CHECKS if opened.files is None or name not in _WHOLE_FILES]
        earlier: list[HubPackage] = []
        if since is not None:
            older = _open(f"{repo_id}@{since}" if repo_id else since, stack, whole=False, endpoint=endpoint)
            earlier = list(map(HubPackage, older.packages))
            opened.downloaded += older.downloaded

        def describe(*, load: bool = False) -> tuple[tuple[AuditedVariant, ...], tuple[str, ...] | None]:
            reports = checks.run_all(opened.packages, only=names, load=load, sandbox="require" if load else "off")
            variants = tuple(
                _audited(each, report, opened, signature_here(each, trusted, repo_id, opened.versions), environment)
                for each, report in zip(packages, reports, strict=True)
            )
            return variants, _api_changes(earlier, packages) if earlier else None

        variants, changes = within_limits(describe, opened.name, len(packages) + len(earlier))
        if load:  # with the limits of `checks.load`
            variants, changes = describe(load=True)
        changed = {audited.variant for audited in variants if audited.changes}
        chosen = fit.choose((parse(audited.variant) for audited in variants), environment)
        loads = chosen.name if chosen and chosen.name not in changed else None
        return Audit(
            opened.name, opened.downloaded, environment.text, environment.client_conflict, loads, variants, changes
        )


@dataclass
class _Opened:
    """The packages of a kernel in a directory, and of one on a Hub, the listing of its files."""

    name: str
    packages: list[Path]
    downloaded: int = 0
    repository: RemoteRepository | None = None
    files: Mapping[str, RemoteFile] | None = None  # None if all files are here
    versions: set[str] = field(default_factory=set)  # whose branches are at the revision


def _open(name: str, stack: ExitStack, *, whole: bool, endpoint: str | None) -> _Opened:
    if Path(name).is_dir():
        directory = Path(name).resolve()
        opened = _Opened(name, _packages(directory / "build") or _packages(directory))
    else:
        repo_id, _, revision = name.partition("@")
        repository = RemoteRepository(repo_id, endpoint=endpoint)
        commit, versions = find_revision(repository, revision)
        root = stack.enter_context(temporary_directory())
        files = package_files(repository, commit)
        if whole:
            repository.download_into(root, commit, files)
            received = sum(remote.size for remote in files.values())
        else:
            received = download(repository, commit, files, root)
        packages, elsewhere = _packages(root / "build"), None if whole else files
        opened = _Opened(f"{repo_id}@{commit}", packages, received, repository, elsewhere, versions)
    if not opened.packages:
        raise CheckError(
            "there are no packages: expected a directory build with one directory for each variant",
            where=opened.name,
            hint="packages are on the branch of a version, as in ORG/NAME@v1; `kernel-builder build` writes local ones",
        )
    return opened


def _packages(directory: Path) -> list[Path]:
    """Return the package in a directory, or the packages below it."""
    if _is_variant(directory.name):
        return [directory]
    return sorted(path for path in directory.glob("[!.]*") if path.is_dir() and _is_variant(path.name))


def _is_variant(name: str) -> bool:
    with suppress(VariantError):
        return bool(parse(name))
    return False


def _audited(
    package: HubPackage, report: CheckReport, opened: _Opened, signature: str, environment: fit.Environment
) -> AuditedVariant:
    try:
        ops = package.api.ops
    except PackageError:  # a check reports it
        ops = {}
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in package.directory.rglob("*.py"))
    fakes = {name for text in texts for name in _FAKE.findall(text)}
    binaries: list[elf.SharedObject] = []
    code: list[DeviceCode] = []
    kernels: dict[str, tuple[str, ...]] = {}
    for path in report.package.binary_paths:
        with suppress(elf.Unreadable):  # a check reports it
            binaries.append(elf.read(path))
            read_at = backends.reading(path)
            parts = [part for backend in backends.every() for part in backend.device_code(path, read_at) or ()]
            code += parts
            kernels.update(_kernels(path, parts) if parts else ())
    undefined = [symbol for binary in binaries for symbol in binary.undefined if symbol.version or not symbol.weak]
    device_code = {arch.removesuffix("+PTX"): {"sass": 0, "ptx": 0} for arch in architectures(code)}
    for part in code:
        device_code[part.arch]["ptx" if part.is_ptx else "sass"] += part.size
    digest = () if opened.files is None else _listed_digest(package, opened.files)
    return AuditedVariant(
        variant=package.variant,
        size=package.size,
        requires={**card.requirements(package.variant), **_oldest_runtimes(binaries)},
        changes=fit.changes(parse(package.variant), package.metadata, environment),
        archs=package.metadata.archs,
        device_code=device_code,
        kernels=kernels,
        libraries=tuple(sorted({library for binary in binaries for library in binary.needed})),
        symbols=dict(Counter(library_of(report.package, symbol) for symbol in undefined)),
        ops=tuple({"schema": schema, "fake": name in fakes} for name, schema in ops.items()),
        signature=signature,
        provenance=package.provenance,
        rebuild=_rebuild(package.metadata),
        findings=(*report.findings, *digest),
    )


def _oldest_runtimes(binaries: Sequence[elf.SharedObject]) -> dict[str, str]:
    """Return the oldest Python, C and C++ libraries with all symbols that binaries need."""
    oldest: dict[str, tuple[int, ...]] = {}
    for version in (version for binary in binaries for version in binary.versions):
        if match := re.fullmatch(r"(GLIBC|GLIBCXX)_(\d+(?:\.\d+)*)", version):
            number = tuple(map(int, match[2].split(".")))
            oldest[match[1]] = max(number, oldest.get(match[1], number))
    python = [release for binary in binaries if (release := oldest_python(binary))]
    return {
        **({"Python": f"{max(python)} and later"} if python else {}),
        **{library: ".".join(map(str, number)) for library, number in sorted(oldest.items())},
    }


def _kernels(binary: Path, parts: Sequence[DeviceCode]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the kernels of a binary by declaration, with their architectures.

    The host code has the names of all. A source whose code is not compressed also has its own; the kernels of others
    have the architectures of the binary if these are the same for each source.
    """
    names = {text.decode() for data in elf.constants(binary) for text in _MANGLED.findall(data)}
    sources: dict[int, list[DeviceCode]] = {}
    for part in parts:
        sources.setdefault(part.source, []).append(part)
    by_name = {name: architectures(own) for own in sources.values() for name in own[0].kernels}
    alike = {architectures(own) for own in sources.values()}
    readable = demangle([*names, *by_name])
    for name in sorted({*names, *by_name}, key=lambda name: readable[name]):
        if readable[name].endswith(")"):  # not a variable, such as cuda::std::(anonymous namespace)::ignore
            yield readable[name], by_name.get(name) or (next(iter(alike)) if len(alike) == 1 else ())


def _listed_digest(package: HubPackage, files: Mapping[str, RemoteFile]) -> Iterator[Finding]:
    """Yield the differences from the digest in the metadata; the Hub lists the SHA-256 of large files."""
    recorded = (package.metadata.digest or {}).get("files")
    recorded = recorded if isinstance(recorded, dict) else {}
    prefix = f"build/{package.variant}/"
    listed = {path.removeprefix(prefix): remote for path, remote in files.items() if path.startswith(prefix)}
    for path in sorted({*recorded, *listed} - {"metadata.json", SIGNATURE} if recorded else ()):
        remote = listed.get(path)
        if remote is None or path not in recorded:
            place = "the digest of metadata.json" if remote is None else "the package"
            yield Finding(f"is only in {place}", _UNCHANGED, path=path, check="digest")
        elif remote.sha256 or remote.size <= SMALL or path.endswith(".py"):
            with suppress(ValueError):
                actual = remote.sha256 or file_digest(package.directory / path)
                if base64.b64decode(str(recorded[path])).hex() == actual:
                    continue
            message = "has another SHA-256 than the digest of metadata.json"
            yield Finding(message, _UNCHANGED, path=path, check="digest")


def _rebuild(metadata: PackageMetadata) -> str:
    if not metadata.has_commit:
        return "no: the metadata has no commit of the sources"
    if metadata.is_dirty:
        return "no: the sources or the builder had uncommitted changes"
    commit = str(metadata.origin("kernel")["commit"])
    return (
        f"yes: `kernel-builder verify --source CHECKOUT`, at commit {commit[:12]} of {metadata.source or 'its sources'}"
    )


def _api_changes(earlier: Sequence[HubPackage], packages: Sequence[HubPackage]) -> tuple[str, ...]:
    """Return how the API differs between packages of the same variant, or else of the same back end."""
    for same in (lambda old, new: old.variant == new.variant, lambda old, new: old.backend is new.backend):
        for new in packages:
            for old in earlier:
                if same(old, new):
                    return old.differences(new)
    return earlier[0].differences(packages[0])
