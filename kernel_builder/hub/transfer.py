"""Export of repositories to one file, and import of that file into a Hub behind an air gap.

The file is a tar archive: `manifest.json`, then each distinct content once, as `files/<sha256>`. The manifest maps the
paths of each repository's branches to contents. The newest commit of each branch is transferred, its history is not.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from kernels_data import Digest, DigestValidationError, Metadata

from kernel_builder.hub.remote_repository import Content, RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.progress import Progress, Silent
from kernel_format.errors import ConfigError, HubError, VerificationError
from kernel_format.files import replacing, temporary_directory
from kernel_format.untrusted_paths import checked_text, checked_tree

_FORMAT = 2
_MANIFEST_BYTES = 64 << 20
MAX_BYTES = 10 * 10**9
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Transferred:
    """What was exported or imported of one repository.

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


def kernels_of(organization: str, *, endpoint: str | None = None, token: str | bool | None = None) -> list[str]:
    """List the kernels of an organisation, as far as the token may see them.

    Raises:
        HubError: If the Hub does not list kernels, cannot be reached, or has none of this organisation.
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
    mine = [repo_id for repo_id in kernels if repo_id.startswith(f"{organization}/")]
    if not mine:
        raise HubError(f"{organization} has no kernels, or none that the token may see", where=api.endpoint)
    return mine


def export_kernels(
    repo_ids: Sequence[str],
    archive: Path,
    *,
    endpoint: str | None = None,
    token: str | Literal[False] | None = None,
    branches: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[Transferred, ...]:
    """Download and verify the branches of repositories, and write them to one file, whole or not at all.

    Args:
        repo_ids: The repositories.
        archive: The file to write.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use. False: none, not even that one.
        branches: The branches; by default all.
        max_bytes: How much to download.
        progress: Receives a line for each branch.

    Raises:
        HubError: If the Hub refuses, or has no such repository or branch.
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
            described = _download(repository, branches, contents, max_bytes, progress)
            manifest["from"] = repository.api.endpoint
            manifest["repositories"][repo_id] = described
            done.append(_transferred(repo_id, described, {n: b["commit"] for n, b in described["branches"].items()}))
        _write(archive, manifest, contents)
    return tuple(done)


def _download(
    repository: RemoteRepository, branches: Sequence[str], contents: Path, max_bytes: int, progress: Progress
) -> dict[str, Any]:
    """Download and verify branches; move each distinct content to `contents`, and return what the manifest says."""
    there = repository.branches()
    if not there:
        raise HubError("there is no such repository, or the token may not see it", where=repository.url)
    if missing := [name for name in branches if name not in there]:
        raise HubError(f"there is no branch {missing[0]!r}; expected one of {', '.join(there)}", where=repository.url)
    described: dict[str, Any] = {"private": bool(repository.is_private()), "branches": {}}
    for name in branches or there:
        commit = there[name]
        where = f"{repository.repo_id}@{name}"
        progress.say(f"{where} ({commit[:12]})")
        with tempfile.TemporaryDirectory(dir=contents.parent) as temporary:
            directory, files = Path(temporary), {}
            listed = repository.files(commit)
            there_already = sum(content.stat().st_size for content in contents.iterdir())
            _check_size(there_already + sum(remote.size for remote in listed.values()), max_bytes, where)
            repository.download_into(directory, commit, listed)
            for path, remote in listed.items():
                content = Content(directory / path)
                if not content.is_in(remote):
                    raise VerificationError("does not match the Hub's listing", where=f"{where}: {path}")
                files[path] = {"sha256": content.sha256, "size": content.size}
            _verify_variants(directory, files, where)
            for path, file in files.items():
                (directory / path).replace(contents / str(file["sha256"]))
        described["branches"][name] = {"commit": commit, "files": dict(sorted(files.items()))}
    return described


def _check_size(size: int, most: int, where: str) -> None:
    if size > most:
        raise VerificationError(
            f"there are {size / 1e9:.1f} GB; at most {most / 1e9:.1f} GB are transferred without asking",
            where=where,
            hint=f"--max-size {math.ceil(size / 1e9)} permits them, if the disk has room for twice as much",
        )


def _transferred(repo_id: str, described: Mapping[str, Any], branches: Mapping[str, str]) -> Transferred:
    sizes = {file["sha256"]: file["size"] for b in described["branches"].values() for file in b["files"].values()}
    return Transferred(repo_id, branches, len(sizes), sum(sizes.values()))


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
    repo_id: str | None = None,
    organization: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    private: bool = False,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[Transferred, ...]:
    """Publish exported repositories to a Hub: one commit for each branch that differs.

    All contents are verified before anything is sent. A private repository is created as a private one.

    Args:
        archive: A file that `export_kernels` wrote.
        repo_id: The repository to publish to, if the archive has a single one. None: that of the archive.
        organization: The organisation to publish all repositories to. None: those of the archive.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.
        private: Make repositories private, if they are created.
        max_bytes: How much to extract.
        progress: Receives a line for each branch.

    Raises:
        ConfigError: If the archive has several repositories, and `repo_id` is given.
        VerificationError: If the file is not an export, is truncated, or was changed, or has more than `max_bytes`.
        HubError: If the Hub refuses.
    """
    progress = progress or Silent()
    with temporary_directory() as temporary:
        contents = temporary / "contents"
        contents.mkdir()
        manifest = _read(archive, contents, max_bytes)
        repositories: Mapping[str, Mapping[str, Any]] = manifest["repositories"]
        if repo_id is not None and len(repositories) != 1:
            raise ConfigError(
                f"the archive has {counted(len(repositories), 'repository')}, which cannot have one name",
                where="--repo-id",
                hint="--organization publishes all of them to one organisation",
            )
        for source, described in repositories.items():
            for name, branch in described["branches"].items():
                _verify_branch(branch, contents, f"{archive}: {source}@{name}")
        done = []
        for source, described in repositories.items():
            name = repo_id or (f"{organization}/{source.partition('/')[2]}" if organization else source)
            target = RemoteRepository(name, endpoint=endpoint, token=token)
            target.require_write()
            target.create(private=private or bool(described.get("private")))
            published = {}
            for branch in sorted(described["branches"], key=lambda name: (name != "main", name)):
                progress.say(f"{target.repo_id}@{branch}")
                origin = f"{source}@{branch} at {described['branches'][branch]['commit'][:12]}, from {manifest['from']}"
                published[branch] = _publish_branch(target, branch, described["branches"][branch], contents, origin)
            done.append(_transferred(target.repo_id, described, published))
    return tuple(done)


def _verify_branch(branch: Mapping[str, Any], contents: Path, where: str) -> None:
    with tempfile.TemporaryDirectory(dir=contents.parent) as tree:
        for path, file in branch["files"].items():
            if path.startswith("build/"):
                (Path(tree) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(tree) / path).hardlink_to(contents / file["sha256"])
        _verify_variants(Path(tree), branch["files"], where)


def _publish_branch(
    target: RemoteRepository, name: str, branch: Mapping[str, Any], contents: Path, message: str
) -> str:
    if name not in target.branches():
        target.create_branch(name)
    head = target.branches()[name]
    there = target.files(head)
    wanted = {path: Content(contents / file["sha256"]) for path, file in branch["files"].items()}
    add = {path: content for path, content in wanted.items() if not content.is_in(there.get(path))}
    delete = [path for path in there if path not in wanted]
    if not add and not delete:
        return head
    return target.commit(name, head, add=add, delete=delete, message=message).revision


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
        raise ValueError("a name is there twice")
    return keys


def _sizes(manifest: dict[str, Any]) -> dict[str, int]:
    """Validate a manifest, and return the size of each content by SHA-256."""
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']!r}; this version reads 1 and {_FORMAT}")
    if not manifest["repositories"]:
        raise ValueError("there is no repository in it")
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
