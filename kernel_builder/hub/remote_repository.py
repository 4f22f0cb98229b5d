"""A repository of type `kernel` on a Hub, accessed by `huggingface_hub`."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    hf_hub_url,
)
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import HFValidationError, build_hf_headers, hf_raise_for_status, paginate, validate_repo_id
from packaging.version import Version

from kernel_builder import network
from kernel_builder.hub.content import Content, RemoteFile
from kernel_builder.hub.retries import Conflict, RateLimited, repeated
from kernel_format.errors import HubError, VerificationError
from kernel_format.files import size_limit
from kernel_format.untrusted_paths import UnsafePath, checked_text, checked_tree

_TYPE = "kernel"
_PUBLIC = "https://huggingface.co"
_WRITES_KERNELS = Version("2.3")
# Exceptions of HTTP libraries if no server listens, or the name does not resolve.
_UNREACHED = ("ConnectError", "ConnectTimeout")
_MALFORMED = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # of the client
_STALE = (409, 412)  # statuses for a commit whose parent is no longer the head of the branch
_AGAIN = "run the same command again; an upload continues, and nothing is published partially"
_HINTS = {
    401: "the Hub does not accept the token: run `hf auth login`, or set HF_TOKEN",
    403: "use a token with write access to the organization; `upload --create-pr` needs it for a new repository only",
    404: "check the name and the revision, and the token with `hf auth whoami`",
}
MAX_FILES = 100_000  # in one revision
MAX_BYTES = 10 * 10**9  # to download of one repository without asking
_TRANSFER_BYTES = 128 << 20  # size of the client's temporary files beside a download
_AT_ONCE = 8  # downloads
_LEAST_ANSWER = 32 << 10  # the bytes of a page of a list for its limit: it may have no entries
# Headers that become paths of files in the client's cache.
_PATH_HEADERS = ("etag", "x-linked-etag", "x-repo-commit", "x-xet-hash")
_answers = network.Answers()  # to the operation that runs in a thread


def _check_answer(response: Any) -> None:
    """Refuse path traversal in headers, which the Hub's client uses as paths in its cache, and lists without end."""
    where = str(response.url).partition("?")[0]
    for header in _PATH_HEADERS:
        value = response.headers.get(header, "").removeprefix("W/").strip('"')
        if value in {".", ".."} or not {"/", "\\"}.isdisjoint(value):
            raise VerificationError(f"the header {header} is not a file name: {ascii(value)[:100]}", where=where)

    # A redirected request keeps its extensions.
    is_list = response.request.extensions.setdefault("is list", f"/api/{_TYPE}s" in response.request.url.path)
    if is_list or not response.is_success:
        _answers.left -= _LEAST_ANSWER
        error = VerificationError("the answer is too long or too slow", where=where)
        response.iter_bytes = _answers.limited(response.iter_bytes, error)


class RemoteRepository:
    """The repository `repo_id`, which need not exist.

    Every method raises `HubError` if the Hub refuses or cannot be reached.

    Args:
        repo_id: Organization or user, and name: `kernels-community/rmsnorm`.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
        token: The token. None: `$HF_TOKEN`, or else the token of `hf auth login`. False: no token.

    Raises:
        HubError: If `repo_id` is not a valid name, or the address has a user or a password.
    """

    def __init__(self, repo_id: str, *, endpoint: str | None = None, token: str | bool | None = None) -> None:
        try:
            validate_repo_id(repo_id)
            if repo_id.count("/") != 1:
                raise HFValidationError("the organization is missing")
        except HFValidationError as error:
            raise HubError(
                f"not a valid repository name: {error}",
                where=repr(repo_id),
                hint="expected a directory, or a name such as my-org/my-kernel (also in --repo-id and [general.hub])",
            ) from error
        self.repo_id = repo_id
        self.api: HfApi = HfApi(endpoint=endpoint, token=token, library_name="kernel-builder")
        if "@" in self.api.endpoint:  # results, commits and errors have the address
            raise HubError(
                "the address of a Hub may not have a user or a password",
                where="HF_ENDPOINT, --endpoint or --from",
                hint="take the part before `@` out of it, and set HF_TOKEN to a token of the Hub that is published to",
            )
        self.where = f"{repo_id} on {self.api.endpoint}"

    @property
    def url(self) -> str:
        """The address of the repository's page."""
        return f"{self.api.endpoint}/kernels/{self.repo_id}"

    def at(self, revision: str) -> str:
        """Return the place of a revision, for errors."""
        return f"{self.repo_id}@{revision} on {self.api.endpoint}"

    def require_write(self) -> None:
        """Raise if every later write would fail: without a token, below a path, or with a client that is too old."""
        if path := urlsplit(self.api.endpoint).path.strip("/"):
            raise HubError(
                f"a Hub below the path /{path} can be read only: the addresses that it names for uploads lack the path",
                where=self.api.endpoint,
                hint="give the Hub a host name or a port of its own",
            )
        version = Version(huggingface_hub.__version__)
        if version < _WRITES_KERNELS:
            raise HubError(
                f"huggingface_hub {version} cannot commit to repositories of type `kernel`",
                where=self.repo_id,
                hint=f"pip install 'huggingface_hub>={_WRITES_KERNELS}'",
            )
        if not self.api.token and not huggingface_hub.get_token():
            raise HubError(
                "no token for writing is set",
                where=self.api.endpoint,
                hint="run `hf auth login`, or set HF_TOKEN to a token with write access to the organization",
            )

    @repeated(RateLimited)
    def is_private(self) -> bool | None:
        """Return whether the repository is private; None if it does not exist, or the token has no access to it."""
        with self._translated_errors("read the repository"):
            try:
                return bool(self.api.repo_info(self.repo_id, repo_type=_TYPE).private)
            except RepositoryNotFoundError:
                return None

    @repeated(RateLimited)
    def kernels_of_owner(self) -> list[str]:
        """Return the names of the public kernels that the Hub lists for the repository's owner."""
        query = {"author": self.repo_id.partition("/")[0]}
        with self._translated_errors("list the owner's kernels"):
            listed = paginate(f"{self.api.endpoint}/api/{_TYPE}s", query, build_hf_headers(token=False))
            return sorted(str(item["id"]) for item in listed)

    @repeated(RateLimited)
    def branches(self) -> Mapping[str, str]:
        """Return the branches and the commits that they point to; empty if there is no repository."""
        with self._translated_errors("list its branches"):
            try:
                refs = self.api.list_repo_refs(self.repo_id, repo_type=_TYPE)
            except RepositoryNotFoundError:
                return {}
        try:
            return {checked_text(branch.name): checked_text(branch.target_commit) for branch in refs.branches}
        except UnsafePath as error:
            raise VerificationError(f"unsafe name of a branch: {error}", where=self.where) from error

    @repeated(RateLimited)
    def title(self, revision: str) -> str:
        """Return the first line of a revision's commit message."""
        with self._translated_errors(f"read the commit {revision}"):
            return str(self.api.list_repo_commits(self.repo_id, revision=revision, repo_type=_TYPE)[0].title)

    @repeated(RateLimited)
    def files(self, revision: str) -> Mapping[str, RemoteFile]:
        """Return every file of a revision, by path."""
        with self._translated_errors(f"list the files of {revision}"):
            tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision, repo_type=_TYPE)
            entries = [entry for entry in islice(tree, MAX_FILES + 1) if isinstance(entry, RepoFile)]
        if len(entries) > MAX_FILES:
            raise VerificationError(f"the revision lists more than {MAX_FILES} files", where=self.at(revision))
        try:
            checked_tree(entry.path for entry in entries)
        except UnsafePath as error:
            raise VerificationError(str(error), where=self.at(revision)) from error
        files = {
            entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
            for entry in entries
        }
        if not all(
            type(file.size) is int and file.size >= 0 and isinstance(file.identity, str) for file in files.values()
        ):
            raise VerificationError("the size or the digest of a file is malformed", where=self.at(revision))
        return files

    @repeated(RateLimited)
    def read_range(self, revision: str, path: str, start: int, stop: int) -> bytes:
        """Return the bytes of a file between two offsets."""
        url = hf_hub_url(self.repo_id, path, repo_type=_TYPE, revision=revision, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.api.token)
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        data = bytearray()
        with (
            self._translated_errors(f"read {path} of {revision}"),
            get_session().stream("GET", url, headers=headers) as response,
        ):
            hf_raise_for_status(response)
            for part in response.iter_bytes():
                data += part
                if len(data) > stop - start:
                    break
        if len(data) != stop - start:
            raise VerificationError(
                f"the Hub sends other bytes of {path} than requested",
                where=self.at(revision),
                hint="if it does not support ranges, `audit --load` downloads whole files",
            )
        return bytes(data)

    @repeated(RateLimited)
    def download(self, revision: str, patterns: Sequence[str]) -> Path:
        """Download the files of a revision that match into the Hub's cache, and return their directory."""
        with self._translated_errors(f"download from {revision}"):
            directory = self.api.snapshot_download(
                self.repo_id, repo_type=_TYPE, revision=revision, allow_patterns=list(patterns)
            )
            return Path(str(directory))

    @repeated(RateLimited)
    def download_into(
        self, directory: Path, revision: str, files: Mapping[str, RemoteFile], max_bytes: int = MAX_BYTES
    ) -> None:
        """Download the listed files, and no others."""
        sizes = [remote.size for remote in files.values()]
        if sum(sizes) > max_bytes:
            raise VerificationError(
                f"there are {sum(sizes) / 1e9:.1f} GB; at most {max_bytes / 1e9:.1f} GB are transferred without asking",
                where=self.at(revision),
                hint=f"--max-size {math.ceil(sum(sizes) / 1e9)} permits them, if the disk has the space",
            )

        def fetch(path: str) -> None:
            self.api.hf_hub_download(self.repo_id, path, repo_type=_TYPE, revision=revision, local_dir=directory)
            if (directory / path).stat().st_size != files[path].size:
                raise VerificationError("does not match the Hub's listing", where=f"{self.at(revision)}: {path}")

        try:
            with (
                self._translated_errors(f"download from {revision}"),
                size_limit(max(sizes, default=0) + _TRANSFER_BYTES),
                ThreadPoolExecutor(_AT_ONCE) as pool,
            ):
                try:
                    for _ in pool.map(fetch, files):
                        pass
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        except OSError as error:
            if error.errno not in {errno.EFBIG, None}:  # None: of the Hub's client, which compares sizes
                raise
            raise VerificationError("the Hub sends more or fewer bytes than listed", where=self.at(revision)) from error

    @repeated(RateLimited)
    def create(self, *, private: bool) -> None:
        """Create the repository, if it does not exist."""
        with self._translated_errors("create the repository"):
            self.api.create_repo(self.repo_id, repo_type=_TYPE, private=private, exist_ok=True)

    @repeated(RateLimited)
    def create_branch(self, name: str) -> None:
        """Create a branch at the head of `main`, if it does not exist."""
        with self._translated_errors(f"create the branch {name}"):
            self.api.create_branch(self.repo_id, repo_type=_TYPE, branch=name, exist_ok=True)

    @repeated(RateLimited)
    def commit(
        self,
        branch: str,
        parent: str,
        *,
        add: Mapping[str, Content],
        delete: Sequence[str],
        message: str,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload files and make one commit with all changes, or none.

        Equal contents are uploaded once. Contents that an earlier attempt has uploaded are not uploaded again.

        Args:
            branch: The branch, or with `create_pr` the base of a new pull request.
            parent: The commit that the branch pointed to when it was read.
            create_pr: Open a pull request instead of moving the branch.
        """
        with self._translated_errors(f"commit to {branch}"):
            additions = [_addition(path, content) for path, content in sorted(add.items())]
            distinct = {addition.upload_info.sha256: addition for addition in reversed(additions)}
            self.api.preupload_lfs_files(
                self.repo_id,
                list(distinct.values()),
                repo_type=_TYPE,
                revision=branch,
                create_pr=create_pr,
                free_memory=False,
            )
            return self.api.create_commit(
                self.repo_id,
                [*additions, *(CommitOperationDelete(path, is_folder=False) for path in sorted(delete))],
                repo_type=_TYPE,
                revision=branch,
                parent_commit=parent,
                commit_message=message,
                create_pr=create_pr,
            )

    @repeated(RateLimited)
    def merge_pull_request(self, number: int, commit: str) -> str:
        """Merge a pull request that is at this commit, and return the commit that its branch then points to.

        The public client does not merge pull requests of kernels.
        """
        url = f"{self.api.endpoint}/api/{_TYPE}s/{self.repo_id}/discussions/{number}/merge"
        with self._translated_errors(f"merge pull request {number}"):
            response = get_session().post(
                url, params={"commit": commit}, headers=build_hf_headers(token=self.api.token)
            )
            hf_raise_for_status(response)
            return str(response.json()["commitOid"])

    @contextmanager
    def _translated_errors(self, action: str) -> Iterator[None]:
        """Turn exceptions of the Hub's client into errors with a hint."""
        # The base class of the HTTP library that this version of the client uses.
        http_error: type[Exception] = HfHubHTTPError.__bases__[0]
        if self.api.endpoint != _PUBLIC:  # the client for Xet follows any address, without limits
            constants.HF_HUB_DISABLE_XET = True
        hooks = get_session().event_hooks
        if _check_answer not in hooks["response"]:
            get_session().event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}
        _answers.left = network.ANSWER_BYTES
        try:
            yield
        except (http_error, ConnectionError, LocalEntryNotFoundError, *_MALFORMED) as error:
            # A response has the Hub's message; its cause, the HTTP library's error, has not.
            if explained := network.explain(error):
                raise HubError(f"cannot {action}: {explained[0]}", where=self.where, hint=explained[1]) from error
            has_response = getattr(error, "response", None) is not None
            raise self._translated(action, error if has_response else error.__cause__ or error) from error

    def _translated(self, action: str, error: BaseException) -> HubError:
        message = getattr(error, "server_message", None) or _first_line(error)
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _STALE:
            moved = f"another publisher moved it; {_AGAIN}"
            hint = "review the pull request again" if action.startswith("merge ") else moved
            return Conflict(f"cannot {action}: {message}", where=self.where, hint=hint)
        if status is not None:
            if status == HTTPStatus.TOO_MANY_REQUESTS:
                limited = f"cannot {action}: the Hub limits the requests (status 429)"
                return RateLimited(limited, self.where, error.response.headers)  # type: ignore[attr-defined]
            known = _HINTS.get(status, _AGAIN if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None)
            return HubError(f"cannot {action}: {message} (status {status})", where=self.where, hint=known)
        if isinstance(error, ConnectionError) or type(error).__name__ in _UNREACHED:
            message = f"no connection to {self.api.endpoint}{network.proxied(self.api.endpoint)}"
        hint = f"check that $HF_ENDPOINT (or --from), if set, is the address of a running Hub; then {_AGAIN}"
        return HubError(f"cannot {action}: {message}", where=self.where, hint=hint)


def _addition(path: str, content: Content) -> CommitOperationAdd:
    """Return the client's operation that writes a file. The client hashes the file again."""
    addition = CommitOperationAdd(path, content.source if isinstance(content.source, bytes) else str(content.source))
    if addition.upload_info.sha256.hex() != content.sha256:
        raise HubError(
            "the file has changed since the checks; nothing has been published",
            where=str(content.source),
            hint="if a build is running, wait for its end and run the same command again",
        )
    return addition


def _first_line(error: BaseException) -> str:
    # The query of a signed address permits what its receiver may do.
    text = re.sub(r"\s*\(Request ID:[^)]*\)\.?|(?<=\w)\?\S*=[^\s']*", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
