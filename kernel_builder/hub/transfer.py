"""Copies kernels of one Hub to another: the newest commit of each branch, without its history."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, paginate
from kernels_data import Digest, DigestValidationError, Metadata

from kernel_builder.hub.remote_repository import Conflict, Content, RemoteFile, RemoteRepository
from kernel_builder.progress import Progress
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory

MAX_BYTES = 10 * 10**9
_ATTEMPTS = 5  # to commit to a branch that another publisher moves


@dataclass(frozen=True)
class Transferred:
    """The result for one repository.

    Attributes:
        repo_id: The repository on the Hub that it was copied to.
        branches: Branch -> its commit there.
        updated: The branches that have changed.
        files: The number of distinct contents that were transferred.
        size: Their size in bytes.
    """

    repo_id: str
    branches: Mapping[str, str]
    updated: Sequence[str]
    files: int
    size: int


def kernels_of(organization: str, endpoint: str) -> list[str]:
    """List the public kernels of an organization."""
    network: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        listed = paginate(f"{endpoint}/api/kernels", {"author": organization}, build_hf_headers(token=False))
        kernels = sorted(str(item["id"]) for item in listed)
    except (network, ConnectionError, LookupError, TypeError) as error:
        raise HubError(
            f"cannot list the kernels of {organization}: {str(error).splitlines()[0]}",
            where=endpoint,
            hint="name one kernel, as ORG/NAME",
        ) from error
    kernels = [repo_id for repo_id in kernels if repo_id.startswith(f"{organization}/")]
    if not kernels:
        raise HubError(f"{organization} has no public kernels", where=endpoint)
    return kernels


def copy_kernels(
    repo_ids: Sequence[str],
    progress: Progress,
    *,
    origin: str,
    organization: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[tuple[Transferred, ...], tuple[KernelBuilderError, ...]]:
    """Copy the branches of another Hub's repositories that differ; unchanged files are not transferred.

    A repository's changes are verified before any of them is sent. A failure concerns one repository: the others are
    copied. The call can be repeated after an error, and several processes may copy the same repositories.

    Args:
        repo_ids: The repositories of the other Hub, which are read without a token.
        progress: Receives a line for each branch that differs.
        origin: The address of the other Hub.
        organization: The organization to publish to. None: the same as on the other Hub.
        endpoint: The address of the Hub to publish to. None: the one that the Hub's own tools use.
        token: The token to publish with. None: the one that the Hub's own tools use.
        max_bytes: The most bytes to download of one repository.

    Returns:
        The results, and the errors of the repositories that could not be copied.
    """
    done, errors = [], []
    for repo_id in repo_ids:
        target_id = f"{organization}/{repo_id.partition('/')[2]}" if organization else repo_id
        try:
            source = RemoteRepository(repo_id, endpoint=origin, token=False)
            target = RemoteRepository(target_id, endpoint=endpoint, token=token)
            done.append(_copy(source, target, max_bytes, progress))
        except KernelBuilderError as error:
            errors.append(error)
    return tuple(done), tuple(errors)


def _copy(source: RemoteRepository, target: RemoteRepository, max_bytes: int, progress: Progress) -> Transferred:
    if not (branches := source.branches()):
        raise HubError("there is no such repository, or it is private", where=source.url)
    commits = dict(target.branches())
    changes: dict[str, Mapping[str, Content | RemoteFile]] = {}
    with temporary_directory() as temporary:
        contents = temporary / "contents"
        contents.mkdir()
        for name in sorted(branches, key=lambda name: (name != "main", name)):
            listed = source.files(branches[name])
            present = target.files(commits[name]) if name in commits else {}
            needed = _needed(listed, present)
            if name not in commits or needed or present.keys() - listed.keys():
                progress.say(f"{source.repo_id}@{name} ({branches[name][:12]})")
                changes[name] = {**listed, **_fetch(source, name, branches[name], needed, contents, max_bytes)}
        if changes:
            target.require_write()
            target.create(private=False)
        updated = []
        for name, wanted in changes.items():
            message = f"{source.repo_id}@{name} at {branches[name][:12]}, from {source.api.endpoint}"
            commits[name], is_new = _publish_branch(target, name, wanted, message)
            updated += [name] if is_new else []
        files, size = len(list(contents.iterdir())), _size_of(contents)
    return Transferred(target.repo_id, {name: commits[name] for name in branches}, updated, files, size)


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


def _fetch(
    repository: RemoteRepository,
    branch: str,
    commit: str,
    listed: Mapping[str, RemoteFile],
    contents: Path,
    max_bytes: int,
) -> dict[str, Content]:
    """Download listed files and verify them and their packages; move them to `contents`, named by their SHA-256."""
    where = f"{repository.repo_id}@{branch}"
    size = sum(remote.size for remote in listed.values()) + _size_of(contents)
    if size > max_bytes:
        raise VerificationError(
            f"there are {size / 1e9:.1f} GB; at most {max_bytes / 1e9:.1f} GB are transferred without asking",
            where=where,
            hint=f"--max-size {math.ceil(size / 1e9)} permits them, if the disk has space for twice as much",
        )
    fetched: dict[str, Content] = {}
    with tempfile.TemporaryDirectory(dir=contents.parent) as temporary:
        directory = Path(temporary)
        repository.download_into(directory, commit, listed)
        for path, remote in listed.items():
            content = fetched[path] = Content(directory / path)
            if not content.is_in(remote):
                raise VerificationError("does not match the Hub's listing", where=f"{where}: {path}")
        _verify_packages(directory, listed, where)
        for path, content in fetched.items():
            content.source = (directory / path).replace(contents / content.sha256)
    return fetched


def _size_of(contents: Path) -> int:
    return sum(content.stat().st_size for content in contents.iterdir())


def _verify_packages(directory: Path, files: Iterable[str], where: str) -> None:
    """Compare every package with the digest in its metadata, if there is one."""
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
