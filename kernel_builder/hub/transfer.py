"""Transfer of repositories between Hubs: directly, or by a file across an air gap.

The file is a tar archive: `manifest.json`, then each distinct content once, as `files/<sha256>`. The manifest maps the
paths of each repository's branches to contents. The newest commit of each branch is transferred, without its history.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from kernels_data import Digest, DigestValidationError, Metadata

from kernel_builder.hub.remote_repository import Conflict, Content, RemoteFile, RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import replacing, temporary_directory
from kernel_format.untrusted_paths import checked_text, checked_tree

_FORMAT = 2
_MANIFEST_BYTES = 64 << 20
MAX_BYTES = 10 * 10**9
_BLOCK = 1 << 20
_ATTEMPTS = 5  # to commit to a branch that another publisher moves


@dataclass(frozen=True)
class Transferred:
    """The result of an export or an import for one repository.

    Attributes:
        repo_id: The repository.
        branches: Branch -> its commit, in the exported or the importing repository.
        updated: The branches that the import has changed; for an export, all.
        files: The number of distinct contents that were transferred.
        size: Their size in bytes.
    """

    repo_id: str
    branches: Mapping[str, str]
    updated: Sequence[str]
    files: int
    size: int


def kernels_of(organization: str, *, endpoint: str | None = None, token: str | bool | None = None) -> list[str]:
    """List the kernels of an organization, as far as the token may see them.

    Raises:
        HubError: If the Hub does not list kernels, cannot be reached, or has none of this organization.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, paginate

    api = HfApi(endpoint=endpoint, token=token)
    network: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        headers = build_hf_headers(token=token)
        kernels = sorted(
            str(item["id"]) for item in paginate(f"{api.endpoint}/api/kernels", {"author": organization}, headers)
        )
    except (network, ConnectionError, LookupError, TypeError) as error:
        raise HubError(
            f"cannot list the kernels of {organization}: {str(error).splitlines()[0]}",
            where=api.endpoint,
            hint="name one kernel, as ORG/NAME",
        ) from error
    kernels = [repo_id for repo_id in kernels if repo_id.startswith(f"{organization}/")]
    if not kernels:
        raise HubError(f"{organization} has no kernels, or none that the token may see", where=api.endpoint)
    return kernels


def export_kernels(
    repo_ids: Sequence[str],
    archive: Path,
    *,
    endpoint: str | None = None,
    token: str | Literal[False] | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[Transferred, ...]:
    """Download and verify the branches of repositories, and write them to one file, whole or not at all.

    Args:
        repo_ids: The repositories.
        archive: The file to write.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use. False: none, not even that one.
        max_bytes: The most bytes to download.
        progress: Receives a line for each branch.

    Raises:
        HubError: If the Hub refuses, or has no such repository.
        VerificationError: If a file does not match the Hub's listing, a package does not match its digest, or there is
            more than `max_bytes`.
    """
    progress = progress or Silent()
    manifest: dict[str, Any] = {"format": _FORMAT, "repositories": {}}
    done = []
    with temporary_directory() as temporary:
        contents = temporary / "contents"
        contents.mkdir()
        for repo_id in repo_ids:
            repository = RemoteRepository(repo_id, endpoint=endpoint, token=token)
            described = _download(repository, contents, max_bytes, progress)
            manifest["from"] = repository.api.endpoint
            manifest["repositories"][repo_id] = described
            commits = {name: branch["commit"] for name, branch in described["branches"].items()}
            done.append(_transferred(repo_id, described, commits, tuple(commits)))
        _write(archive, manifest, contents)
    return tuple(done)


def _download(repository: RemoteRepository, contents: Path, max_bytes: int, progress: Progress) -> dict[str, Any]:
    """Download and verify all branches; move each distinct content to `contents`, and return the manifest's entry."""
    described: dict[str, Any] = {"private": bool(repository.is_private()), "branches": {}}
    for name, commit in _branches(repository).items():
        where = f"{repository.repo_id}@{name}"
        progress.say(f"{where} ({commit[:12]})")
        fetched = _fetch(repository, commit, repository.files(commit), contents, max_bytes, where)
        files = {path: {"sha256": content.sha256, "size": content.size} for path, content in sorted(fetched.items())}
        described["branches"][name] = {"commit": commit, "files": files}
    return described


def _branches(repository: RemoteRepository) -> Mapping[str, str]:
    if not (branches := repository.branches()):
        raise HubError("there is no such repository, or the token may not see it", where=repository.url)
    return branches


def _fetch(
    repository: RemoteRepository,
    commit: str,
    listed: Mapping[str, RemoteFile],
    contents: Path,
    max_bytes: int,
    where: str,
) -> dict[str, Content]:
    """Download listed files and verify them and their packages; the contents are in `contents`, by SHA-256."""
    _check_size(sum(remote.size for remote in listed.values()) + _size_of(contents), max_bytes, where)
    fetched: dict[str, Content] = {}
    with tempfile.TemporaryDirectory(dir=contents.parent) as temporary:
        directory = Path(temporary)
        repository.download_into(directory, commit, listed)
        for path, remote in listed.items():
            content = fetched[path] = Content(directory / path)
            if not content.is_in(remote):
                raise VerificationError("does not match the Hub's listing", where=f"{where}: {path}")
        _verify_variants(directory, listed, where)
        for path, content in fetched.items():
            content.source = (directory / path).replace(contents / content.sha256)
    return fetched


def _size_of(contents: Path) -> int:
    return sum(content.stat().st_size for content in contents.iterdir())


def _check_size(size: int, most: int, where: str) -> None:
    if size > most:
        raise VerificationError(
            f"there are {size / 1e9:.1f} GB; at most {most / 1e9:.1f} GB are transferred without asking",
            where=where,
            hint=f"--max-size {math.ceil(size / 1e9)} permits them, if the disk has space for twice as much",
        )


def _transferred(
    repo_id: str, described: Mapping[str, Any], branches: Mapping[str, str], updated: Sequence[str]
) -> Transferred:
    sizes = {file["sha256"]: file["size"] for name in updated for file in described["branches"][name]["files"].values()}
    return Transferred(repo_id, branches, updated, len(sizes), sum(sizes.values()))


def _write(archive: Path, manifest: Mapping[str, Any], contents: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with replacing(archive) as staged, tarfile.open(fileobj=staged, mode="w", format=tarfile.PAX_FORMAT) as tar:
        described = json.dumps(manifest, indent=1, sort_keys=True).encode()
        _add(tar, "manifest.json", io.BytesIO(described), len(described))
        for path in sorted(contents.iterdir()):
            with path.open("rb") as file:
                _add(tar, f"files/{path.name}", file, path.stat().st_size)


def _add(tar: tarfile.TarFile, name: str, file: Any, size: int) -> None:
    member = tarfile.TarInfo(name)  # without times and owners, so that equal contents give equal archives
    member.size = size
    tar.addfile(member, file)


def import_kernels(
    archive: Path,
    *,
    organization: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[Transferred, ...]:
    """Publish exported repositories to a Hub: one commit for each branch that differs.

    All contents are verified before anything is sent. A private repository is created as a private one.

    Args:
        archive: A file that `export_kernels` wrote.
        organization: The organization to publish all repositories to. None: those of the archive.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.
        max_bytes: The most bytes to extract.
        progress: Receives a line for each branch.

    Raises:
        VerificationError: If the file is not an export, is truncated, or was changed, or has more than `max_bytes`.
        HubError: If the Hub refuses.
    """
    progress = progress or Silent()
    with temporary_directory() as temporary:
        contents = temporary / "contents"
        contents.mkdir()
        manifest = _read(archive, contents, max_bytes)
        repositories: Mapping[str, Mapping[str, Any]] = manifest["repositories"]
        for source, described in repositories.items():
            for name, branch in described["branches"].items():
                _verify_branch(branch, contents, f"{archive}: {source}@{name}")
        done = []
        for source, described in repositories.items():
            target = RemoteRepository(_target_name(source, organization), endpoint=endpoint, token=token)
            target.require_write()
            target.create(private=bool(described.get("private")))
            commits, updated = {}, []
            for name in sorted(described["branches"], key=_main_first):
                branch = described["branches"][name]
                wanted = {path: Content(contents / file["sha256"]) for path, file in branch["files"].items()}
                progress.say(f"{target.repo_id}@{name}")
                origin = f"{source}@{name} at {branch['commit'][:12]}, from {manifest['from']}"
                commits[name], is_new = _publish_branch(target, name, wanted, origin)
                updated += [name] if is_new else []
            done.append(_transferred(target.repo_id, described, commits, updated))
    return tuple(done)


def copy_kernels(
    repo_ids: Sequence[str],
    *,
    origin: str,
    organization: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[tuple[Transferred, ...], tuple[KernelBuilderError, ...]]:
    """Copy the branches of another Hub's repositories that differ; unchanged files are not transferred.

    A repository's changes are verified before any of them is sent. A failure concerns one repository: the others are
    copied. The call can be repeated after an error, and several processes may copy the same repositories.

    Args:
        repo_ids: The repositories of the other Hub, which are read without a token.
        origin: The address of the other Hub.
        organization: The organization to publish to. None: the same as on the other Hub.
        endpoint: The address of the Hub to publish to. None: the one that the Hub's own tools use.
        token: The token to publish with. None: the one that the Hub's own tools use.
        max_bytes: The most bytes to download of one repository.
        progress: Receives a line for each branch that differs.

    Returns:
        The results, and the errors of the repositories that could not be copied.
    """
    done, errors = [], []
    for repo_id in repo_ids:
        source = RemoteRepository(repo_id, endpoint=origin, token=False)
        target = RemoteRepository(_target_name(repo_id, organization), endpoint=endpoint, token=token)
        try:
            done.append(_copy(source, target, max_bytes, progress or Silent()))
        except KernelBuilderError as error:
            errors.append(error)
    return tuple(done), tuple(errors)


def _copy(source: RemoteRepository, target: RemoteRepository, max_bytes: int, progress: Progress) -> Transferred:
    branches = _branches(source)
    commits = dict(target.branches())
    changes: dict[str, Mapping[str, Content | RemoteFile]] = {}
    with temporary_directory() as temporary:
        contents = temporary / "contents"
        contents.mkdir()
        for name in sorted(branches, key=_main_first):
            listed = source.files(branches[name])
            present = target.files(commits[name]) if name in commits else {}
            needed = _needed(listed, present)
            if name not in commits or needed or present.keys() - listed.keys():
                where = f"{source.repo_id}@{name}"
                progress.say(f"{where} ({branches[name][:12]})")
                changes[name] = {
                    **listed,
                    **_fetch(source, branches[name], needed, contents, max_bytes, where),
                }
        if changes:
            target.require_write()
            target.create(private=False)
        updated = []
        for name, wanted in changes.items():
            message = f"{source.repo_id}@{name} at {branches[name][:12]}, from {source.api.endpoint}"
            commits[name], is_new = _publish_branch(target, name, wanted, message)
            updated += [name] if is_new else []
        files = len(list(contents.iterdir()))
        return Transferred(
            target.repo_id, {name: commits[name] for name in branches}, updated, files, _size_of(contents)
        )


def _needed(listed: Mapping[str, RemoteFile], present: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Return the files to download: those that differ, and all files of their packages, which are verified whole."""
    differing = {path for path in listed.keys() | present.keys() if not _is_there(listed.get(path), present.get(path))}
    packages = {package for path in differing if (package := _package_of(path)) is not None}
    return {path: remote for path, remote in listed.items() if path in differing or _package_of(path) in packages}


def _package_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[1] if parts[0] == "build" and len(parts) > 2 else None


def _is_there(wanted: Content | RemoteFile | None, present: RemoteFile | None) -> bool:
    if isinstance(wanted, Content):
        return wanted.is_in(present)
    if wanted is None or present is None or wanted.size != present.size:
        return False
    if wanted.sha256 is None and present.sha256 is None:
        return wanted.blob == present.blob
    return wanted.sha256 == present.sha256


def _target_name(repo_id: str, organization: str | None) -> str:
    return f"{organization}/{repo_id.partition('/')[2]}" if organization else repo_id


def _main_first(branch: str) -> tuple[bool, str]:
    return branch != "main", branch


def _verify_branch(branch: Mapping[str, Any], contents: Path, where: str) -> None:
    with tempfile.TemporaryDirectory(dir=contents.parent) as tree:
        for path, file in branch["files"].items():
            if path.startswith("build/"):
                (Path(tree) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(tree) / path).hardlink_to(contents / file["sha256"])
        _verify_variants(Path(tree), branch["files"], where)


def _publish_branch(
    target: RemoteRepository, name: str, wanted: Mapping[str, Content | RemoteFile], message: str
) -> tuple[str, bool]:
    """Commit the files that differ to a branch, and return its commit, and whether the branch has changed.

    Files that are not a `Content` were equal before; if another publisher has changed one, the copy fails.
    """
    created = False
    for _ in range(_ATTEMPTS):
        head = target.branches().get(name)
        if head is None:
            target.create_branch(name)
            created = True
            continue
        present = target.files(head)
        add = {path: content for path, content in wanted.items() if not _is_there(content, present.get(path))}
        delete = [path for path in present if path not in wanted]
        if not add and not delete:
            return head, created
        contents = {path: content for path, content in add.items() if isinstance(content, Content)}
        if len(contents) < len(add):
            break
        try:
            return target.commit(name, head, add=contents, delete=delete, message=message).revision, True
        except Conflict:
            continue
    raise Conflict(f"another publisher changes the branch {name}", where=target.url, hint="run the same command again")


class _InPieces(io.FileIO):
    """A file of which no more is read at a time than a manifest may have: a header can ask for all of it."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MANIFEST_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _read(archive: Path, contents: Path, max_bytes: int) -> dict[str, Any]:
    """Extract and verify all contents of an archive into the directory `contents`, and return the manifest.

    A manifest of format 1, which is of a single repository, is returned in the form of format 2.
    """
    where = str(archive)
    hint = "copy the file again, or export it again"
    try:
        with _InPieces(archive) as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            first = tar.next()
            if first is None or first.name != "manifest.json" or first.size > _MANIFEST_BYTES:
                raise VerificationError("the file does not begin with a manifest", where=where, hint=hint)
            described = tar.extractfile(first)
            assert described is not None
            manifest: dict[str, Any] = json.loads(described.read(), object_pairs_hook=_without_repetition)
            if manifest["format"] == 1:
                repositories = {manifest["repository"]: {"branches": manifest["branches"]}}
                manifest = {"format": _FORMAT, "from": manifest["from"], "repositories": repositories}
            sizes = _sizes(manifest)
            _check_size(sum(sizes.values()), max_bytes, where)
            if sum(sizes.values()) > os.fstat(opened.fileno()).st_size:
                raise ValueError("its manifest lists more than the file can have")
            while (member := tar.next()) is not None:
                sha256 = PurePosixPath(member.name).name
                file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if member.name != f"files/{sha256}" or file is None or sizes.pop(sha256, None) != member.size:
                    raise VerificationError(f"the manifest does not list {member.name!a}", where=where, hint=hint)
                actual = hashlib.sha256()
                with (contents / sha256).open("xb") as target:
                    while block := file.read(_BLOCK):
                        actual.update(block)
                        target.write(block)
                if actual.hexdigest() != sha256:
                    raise VerificationError(f"{member.name} has another SHA-256", where=where, hint=hint)
    except (tarfile.TarError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError) as error:
        raise VerificationError(f"the file is not a complete export ({error})", where=where, hint=hint) from error
    if sizes:
        raise VerificationError(
            f"the file lacks {counted(len(sizes), 'content')} of its manifest", where=where, hint=hint
        )
    return manifest


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return keys


def _sizes(manifest: dict[str, Any]) -> dict[str, int]:
    """Validate a manifest, and return the size of each content by SHA-256."""
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']!r}; this version reads 1 and {_FORMAT}")
    if not manifest["repositories"]:
        raise ValueError("it has no repository")
    checked_text(manifest["from"])
    sizes: dict[str, int] = {}
    for repo_id, described in manifest["repositories"].items():
        checked_text(repo_id)
        for name, branch in described["branches"].items():
            checked_text(name)
            checked_text(branch["commit"])
            checked_tree(branch["files"])
            for file in branch["files"].values():
                sha256, size = file["sha256"], file["size"]
                if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
                    raise ValueError(f"digest {sha256!a}")
                if type(size) is not int or size < 0 or sizes.setdefault(sha256, size) != size:
                    raise ValueError(f"size {size!a}")
    return sizes


def _verify_variants(directory: Path, files: Iterable[str], where: str) -> None:
    """Compare every variant with the digest in its metadata, if there is one."""
    for path in files:
        parts = PurePosixPath(path).parts
        if len(parts) != 3 or parts[0] != "build" or parts[2] != "metadata.json":
            continue
        try:
            metadata = Metadata.read_from_file(directory / path)
            if metadata.digest is not None:
                package = directory / "build" / parts[1]
                metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, package))
        except (ValueError, DigestValidationError) as error:
            raise VerificationError(
                f"the files do not match the metadata: {error}",
                where=f"{where}: build/{parts[1]}",
                hint="publish the kernel again",
            ) from error
