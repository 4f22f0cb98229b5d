"""A repository of type `kernel` on a Hub, accessed by `huggingface_hub`."""

from __future__ import annotations

import errno
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from kernel_format.errors import HubError, VerificationError
from kernel_format.files import size_limit
from kernel_format.untrusted_paths import UnsafePath, checked_text, checked_tree

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_TYPE = "kernel"
_WRITES_KERNELS = Version("2.3")
# Exceptions of the HTTP libraries that versions of the client use, where nothing listens or the name does not resolve.
_UNREACHED = ("ConnectError", "ConnectTimeout")
_NO_SUCH_ROUTE = 404  # of a Hub that does not tell who its callers are
_STALE = (409, 412)  # statuses for a commit whose parent is no longer the head of the branch


# Of one revision.
MAX_FILES = 100_000
# The client keeps blocks of this size in files of its own.
_TRANSFER_BYTES = 128 << 20
_AT_ONCE = 8
_NAMING_FILES = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")


class Conflict(HubError):
    """The branch has moved since it was read, or is being written by others; nothing has been committed."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a revision. `sha256` is the digest of a large file; any other file is identified by its git `blob`."""

    size: int
    blob: str
    sha256: str | None


class Content:
    """The content of a file to upload, hashed as the Hub does.

    Args:
        source: A local file, or the bytes.
    """

    def __init__(self, source: Path | bytes) -> None:
        sha256 = hashlib.sha256()
        self.source = source
        self.size = len(source) if isinstance(source, bytes) else source.stat().st_size
        blob = hashlib.sha1(b"blob %d\0" % self.size)
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
                blob.update(block)
        self.sha256 = sha256.hexdigest()
        self.blob = blob.hexdigest()

    def is_in(self, remote: RemoteFile | None) -> bool:
        """Return whether a file of the repository has this content."""
        if remote is None or remote.size != self.size:
            return False
        return remote.sha256 == self.sha256 if remote.sha256 is not None else remote.blob == self.blob


@dataclass(frozen=True)
class RemoteCommit:
    """A new commit. `pull_request` is the address of the pull request that it opened, if any."""

    revision: str
    url: str
    pull_request: str | None


def _check_headers(answer: Any) -> None:
    """Refuse an answer whose headers lead elsewhere: the Hub's client makes paths of its cache from them."""
    for header in _NAMING_FILES:
        value = answer.headers.get(header, "").removeprefix("W/").strip('"')
        if value in {".", ".."} or not {"/", "\\"}.isdisjoint(value):
            raise VerificationError(f"its header {header} leads elsewhere: {ascii(value)[:100]}", where=str(answer.url))


class RemoteRepository:
    """The repository `repo_id`, which need not exist.

    Every method raises `HubError` if the Hub refuses or cannot be reached.

    Args:
        repo_id: Organisation or user, and name: `kernels-community/rmsnorm`.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
        token: The token. None: `$HF_TOKEN`, or else that of `hf auth login`. False: no token.

    Raises:
        HubError: If `repo_id` is not a valid name.
    """

    def __init__(self, repo_id: str, *, endpoint: str | None = None, token: str | bool | None = None) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(repo_id)
            if repo_id.count("/") != 1:
                raise HFValidationError("it has no organisation")
        except HFValidationError as error:
            raise HubError(
                f"not a valid name of a repository: {error}",
                where=repr(repo_id),
                hint="names are like my-org/my-kernel; `upload` takes that of --repo-id, or of [general.hub] in "
                "build.toml",
            ) from error
        self.repo_id = repo_id
        self.api: HfApi = HfApi(endpoint=endpoint, token=token, library_name="kernel-builder")

    @property
    def url(self) -> str:
        """The address of the repository's page."""
        return f"{self.api.endpoint}/kernels/{self.repo_id}"

    def require_write(self) -> None:
        """Raise if every later write would fail: without a token, or with a client that is too old."""
        import huggingface_hub

        version = Version(huggingface_hub.__version__)
        if version < _WRITES_KERNELS:
            raise HubError(
                f"huggingface_hub {version} cannot commit to repositories of type `kernel`",
                where=self.repo_id,
                hint=f"pip install 'huggingface_hub>={_WRITES_KERNELS}'",
            )
        if not self.api.token and not huggingface_hub.get_token():
            raise HubError(
                "there is no token to write with",
                where=self.api.endpoint,
                hint="run `hf auth login`, or set HF_TOKEN to a token that may write to the organisation",
            )

    def token_doubt(self) -> str | None:
        """Return why the token may not suffice for an upload, if so. Raise if the Hub says that it cannot write."""
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        if not self.api.token and not huggingface_hub.get_token():
            return "there is no token, which an upload needs: run `hf auth login`, or set HF_TOKEN"
        with self._answers("write with this token"):
            try:
                told = self.api.whoami()
            except HfHubHTTPError as error:
                if error.response.status_code == _NO_SUCH_ROUTE:
                    return None
                raise
        role = told.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise HubError(
                f"the token of {told.get('name')} can read and not write",
                where=self.api.endpoint,
                hint="run `hf auth login`, or set HF_TOKEN, with a token that may write to the organisation",
            )
        owner = self.repo_id.partition("/")[0]
        if role == "admin":  # of a Hub of one's own: the token is for every owner
            return None
        if owner not in (told.get("name"), *(organisation.get("name") for organisation in told.get("orgs", ()))):
            return f"the Hub lists {owner} neither as the owner of the token nor among its organisations"
        return None

    def is_private(self) -> bool | None:
        """Return whether the repository is private; None if there is none, or none that this token may see."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._answers("look at the repository"):
            try:
                return bool(self.api.repo_info(self.repo_id, repo_type=_TYPE).private)
            except RepositoryNotFoundError:
                return None

    def branches(self) -> Mapping[str, str]:
        """Return the branches and the commits that they point to; empty if there is no repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._answers("list its branches"):
            try:
                refs = self.api.list_repo_refs(self.repo_id, repo_type=_TYPE)
            except RepositoryNotFoundError:
                return {}
        try:
            return {checked_text(branch.name): checked_text(branch.target_commit) for branch in refs.branches}
        except UnsafePath as error:
            raise VerificationError(f"a branch: {error}", where=f"{self.repo_id} on {self.api.endpoint}") from error

    def files(self, revision: str) -> Mapping[str, RemoteFile]:
        """Return every file of a revision, by path.

        Raises:
            VerificationError: If paths lead elsewhere, cannot be in one directory, or are too many.
        """
        from huggingface_hub.hf_api import RepoFile

        with self._answers(f"list the files of {revision}"):
            tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision, repo_type=_TYPE)
            entries = [entry for entry in islice(tree, MAX_FILES + 1) if isinstance(entry, RepoFile)]
        where = f"{self.repo_id}@{revision} on {self.api.endpoint}"
        if len(entries) > MAX_FILES:
            raise VerificationError(f"it lists more than {MAX_FILES} files", where=where)
        try:
            checked_tree(entry.path for entry in entries)
        except UnsafePath as error:
            raise VerificationError(str(error), where=where) from error
        return {
            entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
            for entry in entries
        }

    def commit_messages(self, revision: str) -> Sequence[str]:
        """Return the descriptions of the commits of a revision, newest first."""
        with self._answers(f"list the commits of {revision}"):
            commits = self.api.list_repo_commits(self.repo_id, repo_type=_TYPE, revision=revision)
            return [commit.message for commit in commits]

    def download(self, revision: str, patterns: Sequence[str]) -> Path:
        """Download the files of a revision that match into the Hub's cache, and return their directory."""
        with self._answers(f"download from {revision}"):
            directory = self.api.snapshot_download(
                self.repo_id, repo_type=_TYPE, revision=revision, allow_patterns=list(patterns)
            )
            return Path(str(directory))

    def download_into(self, directory: Path, revision: str, files: Mapping[str, RemoteFile]) -> None:
        """Download files that `files` has listed, and no others.

        Raises:
            VerificationError: If the Hub sends more than it has listed.
        """
        largest = max((remote.size for remote in files.values()), default=0)

        def fetch(path: str) -> None:
            self.api.hf_hub_download(self.repo_id, path, repo_type=_TYPE, revision=revision, local_dir=directory)

        try:
            with (
                self._answers(f"download from {revision}"),
                size_limit(largest + _TRANSFER_BYTES),
                ThreadPoolExecutor(_AT_ONCE) as pool,
            ):
                try:
                    for _ in pool.map(fetch, files):
                        pass
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise VerificationError(
                "the Hub sends more than it lists", where=f"{self.repo_id}@{revision} on {self.api.endpoint}"
            ) from error

    def create(self, *, private: bool) -> None:
        """Create the repository, if it does not exist."""
        with self._answers("create the repository"):
            self.api.create_repo(self.repo_id, repo_type=_TYPE, private=private, exist_ok=True)

    def create_branch(self, name: str) -> None:
        """Create a branch at the head of `main`, if it does not exist."""
        with self._answers(f"create the branch {name}"):
            self.api.create_branch(self.repo_id, repo_type=_TYPE, branch=name, exist_ok=True)

    def commit(
        self,
        branch: str,
        parent: str,
        *,
        add: Mapping[str, Content],
        delete: Sequence[str],
        message: str,
        description: str = "",
        create_pr: bool = False,
    ) -> RemoteCommit:
        """Upload files and make one commit with all changes, or none.

        Equal contents are uploaded once. Contents that an earlier attempt has uploaded are not uploaded again.

        Args:
            branch: The branch, or with `create_pr` the base of a new pull request.
            parent: The commit that the branch pointed to when it was read.
            add: Path -> content of the files to write.
            delete: Paths of the files to delete.
            message: The first line of the commit message.
            description: The rest of the commit message.
            create_pr: Open a pull request instead of moving the branch.

        Raises:
            Conflict: If `parent` is no longer the head of the branch.
        """
        from huggingface_hub import CommitOperationDelete

        with self._answers(f"commit to {branch}"):
            self._choose_transfer()
            additions = _additions(add)
            self.api.preupload_lfs_files(
                self.repo_id,
                _one_of_each(additions),
                repo_type=_TYPE,
                revision=branch,
                create_pr=create_pr,
                free_memory=False,
            )
            done = self.api.create_commit(
                self.repo_id,
                [*additions, *(CommitOperationDelete(path, is_folder=False) for path in sorted(delete))],
                repo_type=_TYPE,
                revision=branch,
                parent_commit=parent,
                commit_message=message,
                commit_description=description,
                create_pr=create_pr,
            )
        return RemoteCommit(done.oid, done.commit_url, done.pr_url if create_pr else None)

    def _choose_transfer(self) -> None:
        """Disable the client's Xet uploads if the Hub does not support them: the client does not check."""
        from huggingface_hub import constants

        if not constants.HF_HUB_DISABLE_XET and not self._has_xet:
            constants.HF_HUB_DISABLE_XET = True

    @cached_property
    def _has_xet(self) -> bool:
        from huggingface_hub.utils import build_hf_headers, get_session

        route = f"{self.api.endpoint}/api/{_TYPE}s/{self.repo_id}/xet-write-token/main"
        answer = get_session().get(route, headers=build_hf_headers(token=self.api.token))
        return bool(answer.status_code == 200)

    @contextmanager
    def _answers(self, doing: str) -> Iterator[None]:
        """Turn exceptions of the Hub's client into errors that say what to do."""
        from huggingface_hub import get_session
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        # The base class of the HTTP library that this version of the client uses.
        network: type[Exception] = HfHubHTTPError.__bases__[0]
        where = f"{self.repo_id} on {self.api.endpoint}"
        hooks = get_session().event_hooks
        if _check_headers not in hooks["response"]:
            get_session().event_hooks = {**hooks, "response": [*hooks["response"], _check_headers]}
        try:
            yield
        except RepositoryNotFoundError as error:
            raise HubError(
                f"cannot {doing}: there is no such repository, or the token may not see it",
                where=where,
                hint="check the name, and the token with `hf auth whoami`",
            ) from error
        except RevisionNotFoundError as error:
            raise HubError(f"cannot {doing}: there is no such revision", where=where) from error
        except HfHubHTTPError as error:
            raise _refused(error.response.status_code, error, doing, where) from error
        except (network, ConnectionError, LocalEntryNotFoundError, RuntimeError, ValueError) as error:
            cause = error.__cause__ or error
            if isinstance(cause, ConnectionError) or type(cause).__name__ in _UNREACHED:
                raise HubError(
                    f"cannot {doing}: no connection to {self.api.endpoint}",
                    where=self.repo_id,
                    hint=f"is the Hub running at {self.api.endpoint}? $HF_ENDPOINT names another one; when it runs, "
                    "run the same command again: uploaded files are kept",
                ) from error
            status = getattr(getattr(cause, "response", None), "status_code", None)
            if status is not None:
                raise _refused(status, cause, doing, where) from error
            if not self.api.endpoint.startswith(("http://", "https://")):
                raise HubError(
                    f"cannot {doing}: {self.api.endpoint!r} is no address of a Hub",
                    where=self.repo_id,
                    hint="begin $HF_ENDPOINT with http:// or https://",
                ) from error
            raise HubError(
                f"cannot {doing}: {_first_line(cause)}",
                where=where,
                hint="run the same command again: uploaded files are kept, and nothing is published partially",
            ) from error


def _additions(add: Mapping[str, Content]) -> list[CommitOperationAdd]:
    """Return the client's operations that write files. The client hashes each file again.

    Raises:
        HubError: If a file has changed since it was hashed.
    """
    from huggingface_hub import CommitOperationAdd

    additions = []
    for path, content in sorted(add.items()):
        source = content.source if isinstance(content.source, bytes) else str(content.source)
        addition = CommitOperationAdd(path, source)
        if addition.upload_info.sha256.hex() != content.sha256:
            raise HubError(
                "has changed since it was checked; nothing has been published",
                where=str(content.source),
                hint="a build may be running; run the same command again when it has ended",
            )
        additions.append(addition)
    return additions


def _one_of_each(additions: Sequence[CommitOperationAdd]) -> list[CommitOperationAdd]:
    """Return one addition for each distinct content."""
    return list({addition.upload_info.sha256: addition for addition in reversed(additions)}.values())


def _refused(status: int, error: BaseException, doing: str, where: str) -> HubError:
    said = getattr(error, "server_message", None) or _first_line(error)
    if status in _STALE:
        return Conflict(
            f"cannot {doing}: {said}",
            where=where,
            hint="another publisher has changed the branch; run the same command again",
        )
    hint = {
        401: "the Hub does not know the token: run `hf auth login`, or set HF_TOKEN",
        403: "use a token that may write to this organisation, or --create-pr",
        413: "the Hub does not accept files of this size",
        507: "the Hub has no space left; uploaded files are kept, run the same command again when there is space",
    }.get(status, "run the same command again: uploaded files are kept" if status >= 500 else None)
    return HubError(f"cannot {doing}: {said} (status {status})", where=where, hint=hint)


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\s*\(Request ID:[^)]*\)\.?", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
