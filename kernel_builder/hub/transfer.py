"""Export of a repository to one file, and import of that file into a Hub behind an air gap.

The file is a tar archive: `manifest.json`, then each distinct content once, as `files/<sha256>`. The manifest maps the
paths of each branch to contents. The newest commit of each branch is transferred, its history is not.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kernels_data import Digest, DigestValidationError, Metadata

from kernel_builder.errors import HubError, VerificationError
from kernel_builder.files import replacing
from kernel_builder.hub.remote_repository import Content, RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent

_FORMAT = 1
_MANIFEST_BYTES = 64 << 20
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Transferred:
    """The result of an export or import.

    Attributes:
        repo_id: The repository.
        branches: Branch -> its commit, in the exported or the importing repository.
        files: The number of distinct contents.
        size: Their size in bytes.
    """

    repo_id: str
    branches: Mapping[str, str]
    files: int
    size: int


def export_kernel(
    repo_id: str,
    archive: Path,
    *,
    endpoint: str | None = None,
    token: str | None = None,
    anonymous: bool = False,
    branches: Sequence[str] = (),
    progress: Progress | None = None,
) -> Transferred:
    """Download and verify a repository's branches, and write them to one file, whole or not at all.

    Args:
        repo_id: The repository.
        archive: The file to write.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.
        anonymous: Send no token, not even one that the Hub's own tools would find.
        branches: The branches; by default all.
        progress: Receives a line for each branch.

    Raises:
        HubError: If the Hub refuses, or has no such repository or branch.
        VerificationError: If a file does not match the Hub's listing, or a package does not match its digest.
    """
    progress = progress or Silent()
    repository = RemoteRepository(repo_id, endpoint=endpoint, token=False if anonymous else token)
    there = repository.branches()
    if not there:
        raise HubError("there is no such repository, or the token may not see it", where=repository.url)
    if missing := [name for name in branches if name not in there]:
        raise HubError(f"there is no branch {missing[0]!r}; expected one of {', '.join(there)}", where=repository.url)
    wanted = {name: there[name] for name in branches or there}
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "repository": repo_id,
        "from": repository.api.endpoint,
        "branches": {},
    }
    contents: dict[str, Content] = {}
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as temporary:
        for number, (name, commit) in enumerate(wanted.items()):
            progress.say(f"{repo_id}@{name} ({commit[:12]})")
            directory = repository.download(commit, ["*"], Path(temporary) / str(number))
            files = {}
            for path, remote in repository.files(commit).items():
                content = Content(directory / path)
                if not content.is_in(remote):
                    raise VerificationError("does not match the Hub's listing", where=f"{repo_id}@{name}: {path}")
                files[path] = {"sha256": content.sha256, "size": content.size}
                contents.setdefault(content.sha256, content)
            _verify_variants(directory, files, f"{repo_id}@{name}")
            manifest["branches"][name] = {"commit": commit, "files": dict(sorted(files.items()))}
        _write(archive, manifest, contents)
    return Transferred(repo_id, wanted, len(contents), sum(content.size for content in contents.values()))


def _write(archive: Path, manifest: Mapping[str, Any], contents: Mapping[str, Content]) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with replacing(archive) as staged, tarfile.open(fileobj=staged, mode="w", format=tarfile.PAX_FORMAT) as tar:
        described = json.dumps(manifest, indent=1, sort_keys=True).encode()
        _add(tar, "manifest.json", io.BytesIO(described), len(described))
        for sha256, content in sorted(contents.items()):
            assert isinstance(content.source, Path)
            with content.source.open("rb") as file:
                _add(tar, f"files/{sha256}", file, content.size)


def _add(tar: tarfile.TarFile, name: str, file: Any, size: int) -> None:
    member = tarfile.TarInfo(name)  # without times and owners, so that equal contents give equal archives
    member.size = size
    tar.addfile(member, file)


def import_kernel(
    archive: Path,
    *,
    repo_id: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    private: bool = False,
    progress: Progress | None = None,
) -> Transferred:
    """Publish an exported repository to a Hub: one commit for each branch that differs.

    All contents are verified before anything is sent.

    Args:
        archive: A file that `export_kernel` wrote.
        repo_id: The repository to publish to. None: that of the archive.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.
        private: Make the repository private, if it is created.
        progress: Receives a line for each branch.

    Raises:
        VerificationError: If the file is not an export, is truncated, or was changed.
        HubError: If the Hub refuses.
    """
    progress = progress or Silent()
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as temporary:
        contents = Path(temporary)
        manifest = _read(archive, contents)
        target = RemoteRepository(repo_id or manifest["repository"], endpoint=endpoint, token=token)
        for name, branch in manifest["branches"].items():
            with tempfile.TemporaryDirectory(prefix="kernel-builder-") as tree:
                for path, file in branch["files"].items():
                    if path.startswith("build/"):
                        (Path(tree) / path).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(contents / file["sha256"], Path(tree) / path)
                _verify_variants(Path(tree), branch["files"], f"{archive}: {name}")
        target.require_write()
        target.create(private=private)
        done = {}
        for name in sorted(manifest["branches"], key=lambda name: (name != "main", name)):
            progress.say(f"{target.repo_id}@{name}")
            done[name] = _publish_branch(target, name, manifest, contents)
        sizes = {file["sha256"]: file["size"] for b in manifest["branches"].values() for file in b["files"].values()}
    return Transferred(target.repo_id, done, len(sizes), sum(sizes.values()))


def _publish_branch(target: RemoteRepository, name: str, manifest: Mapping[str, Any], contents: Path) -> str:
    if name not in target.branches():
        target.create_branch(name)
    head = target.branches()[name]
    there = target.files(head)
    wanted = {path: Content(contents / file["sha256"]) for path, file in manifest["branches"][name]["files"].items()}
    add = {path: content for path, content in wanted.items() if not content.is_in(there.get(path))}
    delete = [path for path in there if path not in wanted]
    if not add and not delete:
        return head
    commit = manifest["branches"][name]["commit"]
    message = f"{manifest['repository']}@{name} at {commit[:12]}, from {manifest['from']}"
    return target.commit(name, head, add=add, delete=delete, message=message).revision


def _read(archive: Path, contents: Path) -> dict[str, Any]:
    """Extract and verify all contents of an archive into the directory `contents`, and return the manifest."""
    where = str(archive)
    hint = "copy the file again, or export it again"
    try:
        with tarfile.open(archive, "r:") as tar:
            first = tar.next()
            if first is None or first.name != "manifest.json" or first.size > _MANIFEST_BYTES:
                raise VerificationError("the file does not begin with a manifest", where=where, hint=hint)
            described = tar.extractfile(first)
            assert described is not None
            manifest: dict[str, Any] = json.loads(described.read())
            sizes = _sizes(manifest)
            while (member := tar.next()) is not None:
                sha256 = PurePosixPath(member.name).name
                file = tar.extractfile(member)
                if member.name != f"files/{sha256}" or file is None or sizes.pop(sha256, None) != member.size:
                    raise VerificationError(f"the manifest does not list {member.name!r}", where=where, hint=hint)
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


def _sizes(manifest: dict[str, Any]) -> dict[str, int]:
    """Validate a manifest, and return the size of each content by SHA-256."""
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']!r}; this version reads {_FORMAT}")
    texts = [manifest["repository"], manifest["from"], *(branch["commit"] for branch in manifest["branches"].values())]
    if wrong := [value for value in texts if not isinstance(value, str)]:
        raise ValueError(f"expected text, found {wrong[0]!r}")
    sizes = {}
    for branch in manifest["branches"].values():
        for path, file in branch["files"].items():
            parts = PurePosixPath(path).parts
            if path.startswith("/") or ".." in parts or "\0" in path or not parts:
                raise ValueError(f"path {path!r}")
            if len(file["sha256"]) != 64 or set(file["sha256"]) - set("0123456789abcdef"):
                raise ValueError(f"digest {file['sha256']!r}")
            sizes[file["sha256"]] = file["size"]
    return sizes


def _verify_variants(directory: Path, files: Mapping[str, Mapping[str, Any]], where: str) -> None:
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
