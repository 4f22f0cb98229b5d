"""Routes that make a commit, and those that clients call before one."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from kernel_format import front_matter
from kernel_hub import names
from kernel_hub.git.ignore import ignored
from kernel_hub.git.objects import FileChange, LargeFile, read_pointer
from kernel_hub.git.repository import GitRepository
from kernel_hub.http.receive import Slots, lines, parse_json
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import bad_request, too_large
from kernel_hub.repositories.allowances import Claim
from kernel_hub.routes.parameters import Body, RepoId, Revision, TheCaller, TheHub, TheTurns, base_url

router = APIRouter()

GITIGNORE_BYTES = 64 << 10


class Card(Body):
    """A `README.md` that a client is going to commit."""

    content: str


@router.post("/api/validate-yaml")
def validate_yaml(body: Card, hub: TheHub) -> Response:
    """Check the front matter of a card. The clients call this before they commit one."""
    wrong = _front_matter_error(body.content, hub.settings.limits.front_matter_bytes)
    errors = [{"message": f"the front matter of README.md {wrong}"}] if wrong else []
    return JSONResponse({"errors": errors, "warnings": []}, status_code=400 if wrong else 200)


def _front_matter_error(card: str, limit: int) -> str | None:
    front, _ = front_matter.split(card)
    if front is None:
        return None
    if len(front) > limit:
        return f"has {len(front)} characters; at most {limit} are allowed"
    try:
        front_matter.parse(front)
    except ValueError as error:
        return str(error)
    return None


class PreuploadFile(Body):
    """A file that a client is going to upload."""

    path: str
    size: Annotated[int, Field(ge=0)]
    sample: str = ""


class Preupload(Body):
    """The body of a preupload request."""

    files: Annotated[list[PreuploadFile], Field(max_length=1000)]
    git_ignore: Annotated[str | None, Field(alias="gitIgnore", max_length=GITIGNORE_BYTES)] = None


@router.post("/api/kernels/{organization}/{name}/preupload/{revision}")
def preupload(
    repo_id: RepoId, revision: Revision, body: Preupload, hub: TheHub, caller: TheCaller, create_pr: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Tell the client how to upload each file: in the commit itself, or as a large file before it."""
    repository = hub.to_commit(repo_id, caller, revision, create_pr=create_pr)
    commit = repository.refs.resolve(revision)
    limits = hub.settings.limits
    rules = _ignore_rules(repository, commit) if body.git_ignore is None else body.git_ignore.encode()
    excluded = ignored(rules, [names.path(file.path) for file in body.files])
    answer = []
    for file in body.files:
        path = names.path(file.path)
        if file.size > limits.file_bytes:
            raise too_large(f"{path} has {file.size} bytes; this Hub takes files up to {limits.file_bytes}")
        _check_metadata(path, file.size, limits.metadata_bytes)
        try:
            sample = base64.b64decode(file.sample, validate=True)
        except (binascii.Error, ValueError):
            raise bad_request(f"{path}: the sample is not base64") from None
        large = file.size > limits.small_file_bytes or b"\0" in sample or path.endswith((".so", ".a"))
        present = repository.trees.find(commit, path)
        oid = None
        if present and not present.is_folder:
            oid = present.large.sha256 if present.large else present.oid
        mode = "lfs" if large else "regular"
        answer.append({"path": path, "uploadMode": mode, "shouldIgnore": path in excluded, "oid": oid})
    # Refused here, since every client shows this answer's reason.
    hub.allowances.check(repo_id, sum(file.size for file in body.files if file.path not in excluded))
    return {"files": answer}


def _ignore_rules(repository: GitRepository, commit: str) -> bytes:
    """Return the `.gitignore` of a revision."""
    entry = repository.trees.find(commit, ".gitignore")
    if entry is None or entry.is_folder or entry.size > GITIGNORE_BYTES:
        return b""
    return repository.trees.read(entry)


def _check_metadata(path: str, size: int, limit: int) -> None:
    if path.rpartition("/")[2] == "metadata.json" and size > limit:
        raise too_large(f"{path} has {size} bytes; a metadata.json has at most {limit}, since every loader parses it")


@router.post(
    "/api/kernels/{organization}/{name}/commit/{revision}",
    openapi_extra={"requestBody": {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
async def commit(
    repo_id: RepoId,
    revision: Revision,
    request: Request,
    hub: TheHub,
    caller: TheCaller,
    turns: TheTurns,
    create_pr: bool = False,
) -> dict[str, Any]:
    """Make a commit, with all of its changes or none."""

    def opened() -> GitRepository:
        repository = hub.to_commit(repo_id, caller, revision, create_pr=create_pr)
        repository.refs.resolve(revision)
        return repository

    repository = await to_thread.run_sync(opened)
    slots: Slots = request.app.state.commit_slots
    limits = hub.settings.limits
    header: dict[str, Any] = {}
    changes: list[FileChange] = []
    with slots.hold(caller.name), hub.allowances.claim(repo_id) as claim:
        body = lines(request, longest=limits.inline_file_bytes * 4 // 3 + 8192, total=limits.commit_bytes)
        async for key, value in _operations(body):
            if key == "header":
                header = value
            else:
                changes.append(await to_thread.run_sync(_change, hub, repository, claim, key, value))
            if len(changes) > limits.commit_changes:
                raise too_large(f"more than {limits.commit_changes} changes in one commit")
        title, description, parent = _described(header)

        def write() -> tuple[str, str]:
            return hub.to_commit(repo_id, caller, revision, create_pr=create_pr).commits.create(
                revision,
                changes,
                title=title,
                description=description,
                author=caller.name,
                parent=parent,
                pull_request=create_pr,
                stored=claim.size,
                most_open=None if caller.may_write(repo_id) else limits.pull_requests,
            )

        oid, ref = await turns.change(repo_id, write)
        request.state.commit, request.state.revision = oid, ref
    base = f"{base_url(request)}/kernels/{repo_id}"
    answer: dict[str, Any] = {
        "success": True,
        "commitOid": oid,
        "commitUrl": f"{base}/commit/{oid}",
        "hookOutput": "",
    }
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


async def _operations(body: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    async for line in body:
        try:
            item = await to_thread.run_sync(parse_json, line) if len(line) > 65536 else parse_json(line)
            key, value = item["key"], item["value"]
        except (ValueError, KeyError, TypeError):
            raise bad_request(f"not a line of a commit: {line[:80]!r}; expected {{'key': …, 'value': …}}") from None
        if not isinstance(key, str) or not isinstance(value, dict):
            raise bad_request(f"not a line of a commit: {line[:80]!r}; expected {{'key': …, 'value': …}}")
        yield key, value


def _change(hub: Hub, repository: GitRepository, claim: Claim, key: str, value: dict[str, Any]) -> FileChange:
    """Parse one line of a commit. A file's blob is stored at once; nothing refers to it yet."""
    path = value.get("path")
    if not isinstance(path, str):
        raise bad_request(f"{key}: expected a 'path'")
    limits = hub.settings.limits
    if key in {"deletedFile", "deletedFolder", "deletedEntry"}:
        return FileChange(names.path(path.rstrip("/")), is_folder=key == "deletedFolder")
    names.path(path)
    if key == "lfsFile":
        large = _large_file(hub, repository, path, value.get("oid"), value.get("size"))
        _check_metadata(path, large.size, limits.metadata_bytes)
        return FileChange(path, repository.commits.write_blob(large.pointer()), large=large.sha256)
    if key == "file":
        content = value.get("content")
        if not isinstance(content, str):
            raise bad_request(f"{path}: expected 'content'")
        try:
            encoded = value.get("encoding", "utf-8") == "base64"
            data = base64.b64decode(content, validate=True) if encoded else content.encode()
        except (binascii.Error, ValueError):
            raise bad_request(f"{path}: the content does not have the stated encoding") from None
        if len(data) > limits.inline_file_bytes:
            raise too_large(f"{path} has {len(data)} bytes; upload files above {limits.inline_file_bytes} as LFS")
        _check_metadata(path, len(data), limits.metadata_bytes)
        if (pointer := read_pointer(data)) is not None:  # refers to a large file as `lfsFile` does
            _large_file(hub, repository, path, pointer.sha256, pointer.size)
        claim.grow(len(data))
        return FileChange(path, repository.commits.write_blob(data), large=pointer.sha256 if pointer else None)
    raise bad_request(f"unknown kind of change {key[:40]!r}")


def _large_file(hub: Hub, repository: GitRepository, path: str, oid: object, size: object) -> LargeFile:
    sha256 = names.sha256(oid)
    stored = hub.large_files.size(sha256) if sha256 in repository.owned else None
    if stored is None or (size is not None and size != stored):
        raise bad_request(f"{path}: the large file {sha256} was not uploaded to {repository.repo_id}; upload it first")
    return LargeFile(sha256, stored)
