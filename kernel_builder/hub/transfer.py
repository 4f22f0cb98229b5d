"""Copies kernels of one Hub to another: the newest commit of each branch, without its history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, paginate

from kernel_builder.hub.content import Content, RemoteFile
from kernel_builder.hub.packages import HubPackage
from kernel_builder.hub.remote_repository import RemoteRepository, retried
from kernel_builder.progress import Progress
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory

MAX_BYTES = 10 * 10**9


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
    listed = {name: source.files(commit) for name, commit in branches.items()}
    fetched: dict[str, dict[str, Content]] = {}  # of the branches that differ
    with temporary_directory() as temporary:
        for number, name in enumerate(sorted(branches, key=lambda name: (name != "main", name))):
            present = target.files(commits[name]) if name in commits else {}
            needed = _needed(listed[name], present)
            if name not in commits or needed or present.keys() - listed[name].keys():
                progress.say(f"{source.repo_id}@{name} ({branches[name][:12]})")
                known = sum(content.size for contents in fetched.values() for content in contents.values())
                size = known + sum(remote.size for remote in needed.values())
                _require_space(size, max_bytes, f"{source.repo_id}@{name}")
                fetched[name] = _fetch(source, name, branches[name], needed, temporary / str(number))
        if fetched:
            target.require_write()
            target.create(private=False)
        updated = []
        for name, contents in fetched.items():
            message = f"{source.repo_id}@{name} at {branches[name][:12]}, from {source.api.endpoint}"
            publish = partial(_publish_branch, target, name, listed[name], contents, message)
            commits[name], is_new = retried(publish, progress)
            updated += [name] if is_new else []
    sizes = {content.sha256: content.size for contents in fetched.values() for content in contents.values()}
    heads = {name: commits[name] for name in branches}
    return Transferred(target.repo_id, heads, updated, len(sizes), sum(sizes.values()))


def _require_space(size: int, most: int, where: str) -> None:
    if size > most:
        raise VerificationError(
            f"there are {size / 1e9:.1f} GB; at most {most / 1e9:.1f} GB are transferred without asking",
            where=where,
            hint=f"--max-size {math.ceil(size / 1e9)} permits them, if the disk has the space",
        )


def _needed(listed: Mapping[str, RemoteFile], present: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Return the files to download: those that differ, and all files of their packages, which are verified whole."""
    differing = {path for path in {*listed, *present} if not _is_equal(listed.get(path), present.get(path))}
    packages = {package for path in differing if (package := _package_of(path)) is not None}
    return {path: remote for path, remote in listed.items() if path in differing or _package_of(path) in packages}


def _package_of(path: str) -> str | None:
    parts = path.split("/")
    return parts[1] if parts[0] == "build" and len(parts) > 2 else None


def _is_equal(one: RemoteFile | None, other: RemoteFile | None) -> bool:
    return one is not None and other is not None and (one.size, one.identity) == (other.size, other.identity)


def _fetch(
    repository: RemoteRepository, branch: str, commit: str, listed: Mapping[str, RemoteFile], directory: Path
) -> dict[str, Content]:
    """Download listed files, and compare them with the listing and their packages with their digests."""
    where = f"{repository.repo_id}@{branch}"
    repository.download_into(directory, commit, listed)
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


def _publish_branch(
    target: RemoteRepository,
    name: str,
    listed: Mapping[str, RemoteFile],
    fetched: Mapping[str, Content],
    message: str,
) -> tuple[str, bool]:
    """Commit the files that differ to a branch, and return its commit, and whether the branch has changed.

    Files that were not fetched were equal before; if another publisher has changed one, the copy fails.
    """
    created = name not in target.branches()
    if created:
        target.create_branch(name)
    head = target.branches()[name]
    present = target.files(head)
    add = {path: content for path, content in fetched.items() if not content.is_in(present.get(path))}
    delete = [path for path in present if path not in listed]
    others = listed.keys() - fetched.keys()
    if not all(_is_equal(listed[path], present.get(path)) for path in others):
        hint = "run the same command again"
        raise HubError(f"another publisher changes the branch {name}", where=target.url, hint=hint)
    if not add and not delete:
        return head, created
    return target.commit(name, head, add=add, delete=delete, message=message).oid, True
