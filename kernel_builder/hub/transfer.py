"""Copies kernels of one Hub to another: the newest commit of each branch, without its history."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.hub.content import Content, RemoteFile
from kernel_builder.hub.packages import HubPackage
from kernel_builder.hub.remote_repository import MAX_BYTES, RemoteRepository
from kernel_builder.hub.retries import Conflict, repeated
from kernel_builder.progress import Progress
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory


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
    listed = RemoteRepository(f"{organization}/all", endpoint=endpoint, token=False).kernels_of_owner()
    if not (kernels := [repo_id for repo_id in listed if repo_id.startswith(f"{organization}/")]):
        raise HubError(f"{organization} has no public kernels", where=endpoint)
    return kernels


def copy_kernels(
    repo_ids: Sequence[str],
    progress: Progress,
    *,
    origin: str,
    organization: str | None = None,
    endpoint: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> tuple[tuple[Transferred, ...], tuple[KernelBuilderError, ...]]:
    """Copy the branches of another Hub's repositories that differ; unchanged files are not transferred.

    A branch is verified before any of it is sent. A failure concerns one repository: the others are copied. The call
    can be repeated after an error, and several processes may copy the same repositories.

    Args:
        repo_ids: The repositories of the other Hub, which are read without a token.
        organization: The organization to publish to. None: the same as on the other Hub.
        endpoint: The address of the Hub to publish to. None: the one that the Hub's own tools use.
        max_bytes: The most bytes to download of one repository.

    Returns:
        The results, and the errors of the repositories that could not be copied.
    """
    done, errors = [], []
    for repo_id in repo_ids:
        target_id = f"{organization}/{repo_id.partition('/')[2]}" if organization else repo_id
        try:
            source = RemoteRepository(repo_id, endpoint=origin, token=False)
            target = RemoteRepository(target_id, endpoint=endpoint)
            done.append(_copy(source, target, max_bytes, progress))
        except KernelBuilderError as error:
            errors.append(error)
    return tuple(done), tuple(errors)


def _copy(source: RemoteRepository, target: RemoteRepository, max_bytes: int, progress: Progress) -> Transferred:
    if source.is_private() is not False:  # a client may send a password of its own, and the copy is public
        raise HubError("there is no such repository, or it is private", where=source.url)
    branches = source.branches()
    commits: dict[str, str] = {}
    updated: list[str] = []
    sizes: dict[str, int] = {}  # of the transferred contents
    for name in sorted(branches, key=lambda name: (name == "main", name)):  # sources follow their packages
        limit = max_bytes - sum(sizes.values())
        commits[name], contents = _copy_branch(source, target, name, branches[name], limit, progress)
        if contents is not None:
            updated.append(name)
            sizes |= {content.sha256: content.size for content in contents}
    return Transferred(target.repo_id, commits, sorted(updated), len(sizes), sum(sizes.values()))


@repeated(Conflict)
def _copy_branch(
    source: RemoteRepository, target: RemoteRepository, name: str, commit: str, limit: int, progress: Progress
) -> tuple[str, Collection[Content] | None]:
    """Copy a branch as one commit, and return its commit, and the contents; None if the branches are equal."""
    listed, heads = source.files(commit), target.branches()
    head = heads.get(name)
    present = target.files(head) if head else {}
    needed = _needed(listed, present)
    if head and not needed and not present.keys() - listed.keys():
        return head, None
    where = f"{source.repo_id}@{name}"
    base = head or heads.get("main")  # a new branch is a copy of main
    own = target.files(base).keys() - {".gitattributes"} if base else ()
    if base and own and not target.title(base).startswith(f"{source.repo_id}@"):
        hint = "choose another --organization, or delete the repository from this Hub if its files are not needed"
        raise HubError(f"the last commit is not an import of {source.repo_id}", where=target.at(base), hint=hint)
    progress.say(f"{where} ({commit[:12]})")
    target.require_write()
    with temporary_directory() as directory:
        contents = _fetch(source, where, commit, needed, directory, limit)
        if created := head is None:
            target.create(private=False)
            target.create_branch(name)
            head = target.branches()[name]
            present = target.files(head)
        add = {path: content for path, content in contents.items() if not content.is_in(present.get(path))}
        delete = sorted(present.keys() - listed.keys())
        if add or delete:
            message = f"{where} at {commit[:12]}, from {source.api.endpoint}"
            head = target.commit(name, head, add=add, delete=delete, message=message).oid
        elif not created:
            return head, None
    return head, contents.values()


def _needed(listed: Mapping[str, RemoteFile], present: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Return the files to download: those that differ, and all files of their packages, which are verified whole."""
    ours, theirs = ({(path, r.size, r.identity) for path, r in files.items()} for files in (listed, present))
    differing = {path for path, *_ in ours ^ theirs}
    packages = {package for path in differing if (package := _package_of(path)) is not None}
    return {path: remote for path, remote in listed.items() if path in differing or _package_of(path) in packages}


def _package_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[1] if parts[0] == "build" and len(parts) > 2 else None


def _fetch(
    repository: RemoteRepository, where: str, commit: str, listed: Mapping[str, RemoteFile], directory: Path, limit: int
) -> dict[str, Content]:
    """Download listed files, and compare them with the listing and their packages with their digests."""
    repository.download_into(directory, commit, listed, limit)
    contents = {path: Content(directory / path) for path in listed}
    for path, remote in listed.items():
        if not contents[path].is_in(remote):
            raise VerificationError("does not match the Hub's listing", where=f"{where}: {path}")
    for name in sorted({name for path in listed if (name := _package_of(path))}):
        package = HubPackage(directory / "build" / name)
        if package.metadata.digest is not None and (differences := package.digest_differences):
            raise VerificationError(
                f"the files do not match the metadata: {differences[0]}",
                where=f"{where}: build/{name}",
                hint="publish the kernel again",
            )
    return contents
