"""Routes that create a commit, and routes that clients call before one."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Request
from pydantic import Field

from kernel_format.tree_digest import is_bytecode
from kernel_hub import names
from kernel_hub.git.command import ignored
from kernel_hub.git.objects import FileChange, LargeFile, read_pointer
from kernel_hub.git.repository import GitRepository
from kernel_hub.git.tree_changes import add_folders
from kernel_hub.http.commit_body import CommitBody
from kernel_hub.http.receive import blocks
from kernel_hub.http.turns import in_turn, take_turn
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import bad_request, too_large
from kernel_hub.repositories.index import Claim
from kernel_hub.routes.parameters import Body, HubRoute, RepoId, Revision, TheCaller, TheHub
from kernel_hub.routes.responses import base_url
from kernel_hub.storage.disk import BLOCK, occupied
from kernel_hub.storage.large_files import IncomingFile

router = APIRouter(route_class=HubRoute)

GITIGNORE_BYTES = 64 << 10
_CHANGE_BYTES = 256  # of memory for a change, without its path


@router.post("/api/validate-yaml")
def validate_yaml() -> dict[str, list[str]]:
    """Accept the front matter of any card: the clients call this before they commit one. This Hub does not read it."""
    return {"errors": [], "warnings": []}


class PreuploadFile(Body):
    """A file that a client is going to upload."""

    path: str
    size: Annotated[int, Field(ge=0)]
    sample: str = ""


class Preupload(Body):
    """The body of a preupload request."""

    files: Annotated[list[PreuploadFile], Field(max_length=1000)]
    git_ignore: Annotated[str | None, Field(alias="gitIgnore", max_length=GITIGNORE_BYTES)] = None


def _uploads_by_lfs(request: Request) -> bool:
    """Return whether the client uploads large files by LFS.

    `huggingface_hub` 2 uploads them only by Xet, which this Hub does not have, unless HF_HUB_DISABLE_XET is set. So it
    is asked to send them in the commit. The builder sets HF_HUB_DISABLE_XET for all Hubs but the public one.
    """
    agent = request.headers.get("user-agent", "")
    version = re.search(r"\bhf_hub/(\d+)", agent)
    return agent.startswith("kernel-builder/") or version is None or int(version[1]) < 2


def _is_large(path: str, size: int, start: bytes, limit: int) -> bool:
    """Return whether a file is stored as a large file: it is binary, or larger than `limit`."""
    return size > limit or b"\0" in start or path.endswith((".so", ".a"))


@router.post("/api/kernels/{organization}/{name}/preupload/{revision}")
@in_turn
def preupload(
    repo_id: RepoId,
    revision: Revision,
    body: Preupload,
    request: Request,
    hub: TheHub,
    caller: TheCaller,
    create_pr: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Return how to upload each file: in the commit itself, or by LFS before it."""
    repository = hub.to_commit(repo_id, caller, revision, create_pr=create_pr)
    commit = repository.refs.resolve(revision)
    limits = hub.settings.limits
    rules = (body.git_ignore or "").encode()
    if body.git_ignore is None and (entry := repository.revisions.find(commit, ".gitignore")) is not None:
        rules = b"" if entry.is_folder or entry.size > GITIGNORE_BYTES else repository.revisions.read(entry)
    excluded = ignored(rules, [names.path(file.path) for file in body.files])
    inline_bytes = 0 if _uploads_by_lfs(request) else limits.inline_file_bytes
    found = repository.revisions.find_all(commit, (file.path for file in body.files))
    answer = []
    for file in body.files:
        path = names.path(file.path, is_new=True)
        if file.size > limits.file_bytes:
            raise too_large(f"{path} has {file.size} bytes; this Hub takes files up to {limits.file_bytes}")
        _check_metadata(path, file.size, limits.metadata_bytes)
        try:
            sample = base64.b64decode(file.sample, validate=True)
        except (binascii.Error, ValueError):
            raise bad_request(f"{path}: the sample is not base64") from None
        large = _is_large(path, file.size, sample, limits.small_file_bytes) and file.size > inline_bytes
        present = found.get(path)
        oid = None
        if present and not present.is_folder:
            oid = present.large.sha256 if present.large else present.oid
        mode = "lfs" if large else "regular"
        answer.append({"path": path, "uploadMode": mode, "shouldIgnore": path in excluded, "oid": oid})
    # Refused here, since every client shows the reason of this response.
    hub.allowances.check(sum(file.size for file in body.files if file.path not in excluded))
    return {"files": answer}


def _check_metadata(path: str, size: int, limit: int) -> None:
    if path.rpartition("/")[2] == "metadata.json" and size > limit:
        raise too_large(f"{path} has {size} bytes; a metadata.json has at most {limit}, since every loader parses it")


@router.post(
    "/api/kernels/{organization}/{name}/commit/{revision}",
    openapi_extra={"requestBody": {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
async def commit(
    repo_id: RepoId, revision: Revision, request: Request, hub: TheHub, caller: TheCaller, create_pr: bool = False
) -> dict[str, Any]:
    """Create a commit with all changes of the body, or none."""

    def opened() -> GitRepository:
        repository = hub.to_commit(repo_id, caller, revision, create_pr=create_pr)
        repository.refs.resolve(revision)
        return repository

    repository = await take_turn(opened, "quick")
    limits = hub.settings.limits
    staged = ExitStack()
    try:
        claim = staged.enter_context(hub.allowances.claim())
        upload = _Upload(hub, repository, claim, staged)
        body = CommitBody(upload.add, upload.new_file, claim, limits)
        async for block in blocks(request):
            known = len(upload.changes)
            await take_turn(partial(body.feed, block), "quick")
            request.state.hold(sum(len(change.path) + _CHANGE_BYTES for change in upload.changes[known:]))
            os.utime(upload.directory)  # `kernel-hub check` removes what has not changed for long

        def write() -> tuple[str, str]:
            body.end()
            title, description, parent = _described(upload.header)
            again = hub.to_commit(repo_id, caller, revision, create_pr=create_pr)
            again.refs.new.use(upload.directory)
            return again.commits.create(
                revision,
                upload.changes,
                title=title,
                description=description,
                author=caller.name,
                parent=parent,
                pull_request=create_pr,
                store=upload.store,
                most_open=None if caller.may_write(repo_id) else limits.pull_requests,
            )

        oid, ref = await take_turn(write, "write")
        request.app.state.metrics.received.inc(sum(file.size for file in upload.large))
        request.state.commit, request.state.revision = oid, ref
    finally:
        with anyio.CancelScope(shield=True):
            await take_turn(staged.close, "quick")
    base = f"{base_url(request)}/kernels/{repo_id}"
    answer: dict[str, Any] = {"success": True, "commitOid": oid, "commitUrl": f"{base}/commit/{oid}", "hookOutput": ""}
    if create_pr:
        answer["pullRequestUrl"] = f"{base}/discussions/{ref.rpartition('/')[2]}"
    return answer


def _described(header: dict[str, Any]) -> tuple[str, str, str | None]:
    """Return the title, the description and the expected parent of a commit."""
    title = header.get("summary")
    if not isinstance(title, str) or not title.strip():
        raise bad_request("the commit has no header line with a 'summary'")
    names.text("the commit's summary", title)
    description = names.text("the commit's description", header.get("description") or "")
    parent = header.get("parentCommit")
    if parent is not None and not (isinstance(parent, str) and re.fullmatch(r"[0-9a-f]{7,40}", parent)):
        raise bad_request(f"parentCommit {str(parent)[:80]!a} is not a commit: expected 7 to 40 hex digits")
    return title, description, parent


def _operation(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if isinstance(key, str) and isinstance(value, dict):
            return key, value
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise bad_request(f"not a line of a commit: {line[:80]!r}; expected {{'key': …, 'value': …}}")


class _Upload:
    """The changes of a commit. Nothing enters the repository before the whole commit is checked."""

    def __init__(self, hub: Hub, repository: GitRepository, claim: Claim, staged: ExitStack) -> None:
        self._hub = hub
        self._limits = hub.settings.limits
        self._repository = repository
        self._claim = claim
        self._staged = staged
        self.header: dict[str, Any] = {}
        self.changes: list[FileChange] = []
        self.large: list[IncomingFile] = []
        self._folders: set[str] = set()
        self.directory = staged.enter_context(repository.refs.new.staged())

    def new_file(self) -> IncomingFile:
        """Create a file for content that arrives in the commit; it is deleted unless the store adopts it."""
        return self._staged.enter_context(self._hub.large_files.receive(self.directory))

    def add(self, line: bytes, file: IncomingFile | None) -> None:
        """Add one line of the commit. `file` has its content if that is long."""
        key, value = _operation(line)
        if key == "header":
            self._claim(BLOCK)
            self.header = value
            return
        path = value.get("path")
        if not isinstance(path, str):
            raise bad_request(f"{key}: expected a 'path'")
        self._claim(BLOCK * add_folders(self._folders, names.path(path.rstrip("/"))))
        if key in {"deletedFile", "deletedFolder", "deletedEntry"}:
            self.changes.append(FileChange(path.rstrip("/"), is_folder=key == "deletedFolder"))
            return
        if is_bytecode(names.path(path, is_new=True)):
            raise bad_request(f"{path} is bytecode, which Python runs in place of a source: delete it")
        if key == "lfsFile":
            large = self._stored(path, value.get("oid"), value.get("size"))
            self.changes.append(FileChange(path, self._stage(large.pointer()), large=large.sha256))
        elif key == "file":
            self._add_file(path, value, file)
        else:
            raise bad_request(f"unknown kind of change {key[:40]!r}")

    def _add_file(self, path: str, value: dict[str, Any], file: IncomingFile | None) -> None:
        content, is_base64 = value.get("content"), value.get("encoding", "utf-8") == "base64"
        if not isinstance(content, str) or (file is not None and (content or not is_base64)):
            raise bad_request(f"{path}: expected 'content', in base64 if it is longer than 64 KiB")
        if file is None:
            try:
                data = base64.b64decode(content, validate=True) if is_base64 else content.encode()
            except (binascii.Error, ValueError):
                raise bad_request(f"{path}: the content does not have the stated encoding") from None
            size, start = len(data), data[:512]
        else:
            file.seal()
            size = file.size
            with file.path.open("rb") as opened:
                start = opened.read(512)
        _check_metadata(path, size, self._limits.metadata_bytes)
        if size and _is_large(path, size, start, self._limits.small_file_bytes):
            if file is None:
                self._claim(occupied(size))
                file = self.new_file()
                file.write(data)
                file.seal()
            self.large.append(file)
            self.changes.append(FileChange(path, self._stage(LargeFile(file.sha256, size).pointer())))
            return
        if file is not None:
            data = file.path.read_bytes()
            file.path.unlink()
        pointer = read_pointer(data)
        if pointer is not None:  # refers to a large file as `lfsFile` does
            self._stored(path, pointer.sha256, pointer.size)
        self.changes.append(FileChange(path, self._stage(data), large=pointer.sha256 if pointer else None))

    def _stage(self, data: bytes) -> str:
        self._claim(occupied(len(data)))
        return self._repository.commits.write_blob(data)

    def store(self) -> None:
        """Store the contents of the large files."""
        if self.large:
            self._hub.keep(self._repository, self.large)

    def _stored(self, path: str, oid: object, size: object) -> LargeFile:
        sha256 = names.sha256(oid)
        stored = self._hub.large_files.size(sha256) if sha256 in self._repository.owned else None
        if stored is None or (size is not None and size != stored):
            missing = f"the large file {sha256} was not uploaded to {self._repository.repo_id}"
            raise bad_request(f"{path}: {missing}; upload it first")
        _check_metadata(path, stored, self._limits.metadata_bytes)
        return LargeFile(sha256, stored)
