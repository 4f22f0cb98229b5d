"""The routes that the public clients use for kernels.

Paths and fields have the names that `huggingface_hub` and `kernels` send and read.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timezone
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, quote

import yaml
from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from kernel_builder.hub.server import names
from kernel_builder.hub.server.content import content_response
from kernel_builder.hub.server.hub import Hub
from kernel_builder.hub.server.receive import Slots, blocks, lines, segment
from kernel_builder.hub.server.refusals import (
    Refusal,
    bad_request,
    conflict,
    no_entry,
    no_organization,
    no_space,
    no_token,
    too_large,
)
from kernel_builder.hub.server.repositories import Change, Entry, LargeFile, Ref, Repository, read_pointer
from kernel_builder.hub.server.tokens import ANY, Caller

router = APIRouter()

TREE_PAGE = 1000
EXPANDED_TREE_PAGE = 50
HISTORY_PAGE = 50


def hub_of(request: Request) -> Hub:
    """The Hub that this application serves."""
    hub = request.app.state.hub
    assert isinstance(hub, Hub)
    return hub


def caller_of(request: Request) -> Caller:
    """Who sends this request."""
    sent = request.headers.get("authorization", "")
    if sent.lower().startswith("basic ") and request.method not in {"GET", "HEAD"}:
        # A browser adds it by itself, whoever made the form.
        raise no_token("send the token as 'Authorization: Bearer …' to change something")
    caller = hub_of(request).caller(sent)
    request.state.caller = caller.name
    return caller


def repo_of(organization: str, name: str) -> str:
    """The repository that a path names."""
    return names.repo_id(segment(organization), segment(name))


def revision_of(revision: str) -> str:
    """The revision that a path names."""
    return segment(revision)


def path_of(path: str) -> str:
    """The file or folder that a path names."""
    return segment(path).strip("/")


TheHub = Annotated[Hub, Depends(hub_of)]
TheCaller = Annotated[Caller, Depends(caller_of)]
RepoId = Annotated[str, Depends(repo_of)]
Revision = Annotated[str, Depends(revision_of)]
EntryPath = Annotated[str, Depends(path_of)]


class Body(BaseModel):
    """What a client sends; fields that we do not know are its own business."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


def base_url(request: Request) -> str:
    """The address under which this client reaches us."""
    return str(request.base_url).rstrip("/")


def timestamp(seconds: int) -> str:
    """A time as the clients parse it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


# Who


@router.get("/api/whoami-v2")
def whoami(hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Who the token belongs to, and what it may do."""
    if not caller.name:
        raise no_token()
    organizations = {name for name in caller.scopes if name != ANY}
    if ANY in caller.scopes:
        organizations |= {repo_id.partition("/")[0] for repo_id in hub.repositories} | hub.settings.trusted
    role = "write" if "write" in caller.scopes.values() else "read"
    return {
        "type": "user",
        "id": caller.name,
        "name": caller.name,
        "fullname": caller.name,
        "avatarUrl": "",
        "isPro": False,
        "orgs": [
            {
                "type": "org",
                "id": name,
                "name": name,
                "fullname": name,
                "avatarUrl": "",
                "roleInOrg": "write" if caller.may_write(name) else "read",
            }
            for name in sorted(organizations)
        ],
        "auth": {"type": "access_token", "accessToken": {"displayName": caller.name, "role": role}},
    }


@router.get("/api/organizations/{organization}/overview")
def organization_overview(organization: str, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """An organisation, and whether its kernels load without `trust_remote_code`."""
    name = segment(organization)
    names.repo_id(name, "x")
    kernels = [repository for repository in hub.visible(caller) if repository.repo_id.startswith(f"{name}/")]
    if not kernels and name not in hub.settings.trusted and name not in caller.scopes:
        raise no_organization(name)
    return {
        "name": name,
        "fullname": name,
        "avatarUrl": "",
        "isVerified": name in hub.settings.trusted,
        "numModels": 0,
        "numDatasets": 0,
        "numSpaces": 0,
        "numKernels": len(kernels),
        "trustedKernelPublisher": name in hub.settings.trusted,
    }


# Repositories


class NewRepository(Body):
    """The body of `create_repo`."""

    name: str
    organization: str | None = None
    type: str = "model"
    private: bool | None = None
    visibility: Literal["public", "private", "protected"] | None = None


class OldRepository(Body):
    """The body of `delete_repo`."""

    name: str
    organization: str | None = None
    type: str = "model"


class MovedRepository(Body):
    """The body of `move_repo`."""

    from_repo: str = Field(alias="fromRepo")
    to_repo: str = Field(alias="toRepo")
    type: str = "model"


class RepositorySettings(Body):
    """The body of `update_repo_settings`."""

    private: bool | None = None
    visibility: Literal["public", "private"] | None = None


def _kernels_only(kind: str) -> None:
    if kind != "kernel":
        raise bad_request(f"this Hub holds kernels, not repositories of type {kind!r}: pass repo_type='kernel'")


def _split(repo_id: str) -> str:
    organization, _, name = repo_id.partition("/")
    return names.repo_id(organization, name)


@router.post("/api/repos/create")
def create_repository(body: NewRepository, request: Request, hub: TheHub, caller: TheCaller) -> dict[str, str]:
    """Make a repository."""
    _kernels_only(body.type)
    organization = body.organization or caller.name
    if not caller.name:
        raise no_token()
    repo_id = names.repo_id(organization, body.name)
    hub.must_write(organization, caller)
    url = f"{base_url(request)}/kernels/{repo_id}"
    if repo_id in hub.repositories:
        raise conflict(f"You already created this kernel repo: {repo_id} exists", url=url)
    private = body.visibility == "private" if body.visibility else bool(body.private)
    try:
        hub.repositories.create(repo_id, private=private, author=caller.name)
    except Refusal as refusal:  # another caller was faster; clients that allow for that read the address
        refusal.url = url
        raise
    return {"url": url, "name": repo_id, "id": repo_id}


@router.delete("/api/repos/delete")
def delete_repository(body: OldRepository, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Remove a repository."""
    _kernels_only(body.type)
    repo_id = names.repo_id(body.organization or caller.name, body.name)
    hub.to_write(repo_id, caller)
    hub.repositories.delete(repo_id)
    return {"success": True}


@router.post("/api/repos/move")
def move_repository(body: MovedRepository, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Rename a repository."""
    _kernels_only(body.type)
    source, target = _split(body.from_repo), _split(body.to_repo)
    hub.to_write(source, caller)
    hub.must_write(target.partition("/")[0], caller)
    hub.repositories.move(source, target)
    return {"success": True}


@router.put("/api/kernels/{organization}/{name}/settings")
def change_settings(repo_id: RepoId, body: RepositorySettings, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Show or hide a repository."""
    private = body.visibility == "private" if body.visibility else body.private
    if private is None:
        raise bad_request("expected 'private' or 'visibility'")
    hub.to_write(repo_id, caller).set_private(private)
    return {"private": private}


def _info(repository: Repository, commit: str) -> dict[str, Any]:
    return {
        "_id": repository.repo_id,
        "id": repository.repo_id,
        "author": repository.repo_id.partition("/")[0],
        "sha": commit,
        "lastModified": timestamp(repository.last_modified(commit)),
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
    }


@router.get("/api/kernels")
def list_kernels(
    hub: TheHub,
    caller: TheCaller,
    search: str = "",
    author: str = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> list[dict[str, Any]]:
    """The kernels that exist for the caller."""
    found = (
        repository
        for repository in hub.visible(caller)
        if search.lower() in repository.repo_id.lower() and (not author or repository.repo_id.startswith(f"{author}/"))
    )
    return [_info(repository, repository.resolve("main")) for repository, _ in zip(found, range(limit), strict=False)]


@router.get("/api/kernels/{organization}/{name}")
def kernel_info(repo_id: RepoId, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """A kernel at `main`."""
    return kernel_info_at(repo_id, "main", hub, caller)


@router.get("/api/kernels/{organization}/{name}/revision/{revision}")
def kernel_info_at(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """A kernel at a revision."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.resolve(revision)
    files = [{"rfilename": entry.path} for entry in repository.entries(commit, recursive=True) if not entry.is_folder]
    return {**_info(repository, commit), "siblings": files}


# Refs


class NewBranch(Body):
    """The body of `create_branch`."""

    starting_point: str | None = Field(None, alias="startingPoint")
    empty_branch: bool = Field(False, alias="emptyBranch")
    overwrite: bool = False


class NewTag(Body):
    """The body of `create_tag`."""

    tag: str
    message: str | None = Field(None, max_length=10_000)


@router.get("/api/kernels/{organization}/{name}/refs")
def list_refs(repo_id: RepoId, hub: TheHub, caller: TheCaller, include_prs: bool = False) -> dict[str, Any]:
    """Branches, tags and pull requests."""
    refs = list(hub.to_read(repo_id, caller).refs())

    def listed(prefix: str) -> list[dict[str, str]]:
        return [_ref(ref) for ref in refs if ref.full.startswith(prefix)]

    found = {"branches": listed("refs/heads/"), "tags": listed("refs/tags/"), "converts": []}
    return {**found, "pullRequests": listed("refs/pr/")} if include_prs else found


def _ref(ref: Ref) -> dict[str, str]:
    return {"name": ref.name, "ref": ref.full, "targetCommit": ref.commit}


@router.post("/api/kernels/{organization}/{name}/branch/{revision}")
def create_branch(
    repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller, body: NewBranch | None = None
) -> dict[str, bool]:
    """Make a branch."""
    start, empty, overwrite = (body.starting_point, body.empty_branch, body.overwrite) if body else (None, False, False)
    hub.to_write(repo_id, caller).create_branch(revision, start, empty=empty, overwrite=overwrite)
    return {"success": True}


@router.delete("/api/kernels/{organization}/{name}/branch/{revision}")
def delete_branch(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Remove a branch."""
    hub.to_write(repo_id, caller).delete_branch(revision)
    return {"success": True}


@router.post("/api/kernels/{organization}/{name}/tag/{revision}")
def create_tag(repo_id: RepoId, revision: Revision, body: NewTag, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Tag a revision."""
    hub.to_write(repo_id, caller).create_tag(body.tag, revision, body.message, caller.name)
    return {"success": True}


@router.delete("/api/kernels/{organization}/{name}/tag/{revision}")
def delete_tag(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Remove a tag."""
    hub.to_write(repo_id, caller).delete_tag(revision)
    return {"success": True}


# Trees and history


def _item(entry: Entry) -> dict[str, Any]:
    if entry.is_folder:
        return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
    item = {"type": "file", "oid": entry.oid, "size": entry.content_size, "path": entry.path}
    if entry.large:
        item["lfs"] = {"oid": entry.large.sha256, "size": entry.large.size, "pointerSize": entry.size}
    return item


def _expanded(repository: Repository, commit: str, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    entries = list(entries)
    last = repository.last_commits(commit, [entry.path for entry in entries])
    return [
        {
            **_item(entry),
            "lastCommit": {
                "id": last[entry.path].oid,
                "title": last[entry.path].title,
                "date": timestamp(last[entry.path].time),
            },
        }
        for entry in entries
    ]


def _next_page(request: Request, response: Response, **parameters: object) -> None:
    url = request.url.include_query_params(**parameters)
    path = quote(request.scope["raw_path"].decode("ascii"), safe="/%") if "raw_path" in request.scope else url.path
    response.headers["Link"] = f'<{base_url(request)}{path}?{url.query}>; rel="next"'


@router.get("/api/kernels/{organization}/{name}/tree/{revision}")
def list_top(
    repo_id: RepoId,
    revision: Revision,
    request: Request,
    response: Response,
    hub: TheHub,
    caller: TheCaller,
    recursive: bool = False,
    expand: bool = False,
    cursor: Annotated[int, Query(ge=0)] = 0,
) -> list[dict[str, Any]]:
    """What is in a revision."""
    return list_folder(repo_id, revision, "", request, response, hub, caller, recursive, expand, cursor)


@router.get("/api/kernels/{organization}/{name}/tree/{revision}/{path:path}")
def list_folder(
    repo_id: RepoId,
    revision: Revision,
    path: EntryPath,
    request: Request,
    response: Response,
    hub: TheHub,
    caller: TheCaller,
    recursive: bool = False,
    expand: bool = False,
    cursor: Annotated[int, Query(ge=0)] = 0,
) -> list[dict[str, Any]]:
    """What is in a folder of a revision."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.resolve(revision)
    entries = repository.entries(commit, path, recursive=recursive)
    page = EXPANDED_TREE_PAGE if expand else TREE_PAGE
    shown = entries[cursor : cursor + page]
    if cursor + page < len(entries):
        _next_page(request, response, cursor=cursor + page)
    return _expanded(repository, commit, shown) if expand else [_item(entry) for entry in shown]


@router.post(
    "/api/kernels/{organization}/{name}/paths-info/{revision}",
    openapi_extra={
        "requestBody": {
            "content": {
                "application/x-www-form-urlencoded": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "paths": {"type": "array", "items": {"type": "string"}},
                            "expand": {"type": "boolean"},
                        },
                        "required": ["paths"],
                    }
                }
            }
        }
    },
)
async def paths_info(
    repo_id: RepoId, revision: Revision, request: Request, hub: TheHub, caller: TheCaller
) -> list[dict[str, Any]]:
    """Those of the named files and folders that exist."""
    body = await request.body()
    try:
        if request.headers.get("content-type", "").startswith("application/json"):
            fields = json.loads(body)
            paths, expand = fields["paths"], bool(fields.get("expand"))
        else:
            form = parse_qs(body.decode())
            paths, expand = form.get("paths", []), form.get("expand", ["false"])[0].lower() in {"true", "1"}
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise bad_request("expected a form or JSON with 'paths'") from None
    if len(paths) > TREE_PAGE:
        raise too_large(f"{len(paths)} paths at once; at most {TREE_PAGE} are answered")

    def look() -> list[dict[str, Any]]:
        repository = hub.to_read(repo_id, caller)
        commit = repository.resolve(revision)
        found = [entry for path in paths if (entry := repository.find(commit, path.rstrip("/"))) is not None]
        return _expanded(repository, commit, found) if expand else [_item(entry) for entry in found]

    return await to_thread.run_sync(look)


@router.get("/api/kernels/{organization}/{name}/commits/{revision}")
def list_commits(
    repo_id: RepoId,
    revision: Revision,
    request: Request,
    response: Response,
    hub: TheHub,
    caller: TheCaller,
    p: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> list[dict[str, Any]]:
    """The history of a revision, newest first."""
    repository = hub.to_read(repo_id, caller)
    history = repository.history(repository.resolve(revision), skip=p * HISTORY_PAGE, count=HISTORY_PAGE + 1)
    if len(history) > HISTORY_PAGE:
        _next_page(request, response, p=p + 1)
    return [
        {
            "id": commit.oid,
            "title": commit.title,
            "message": commit.message,
            "authors": [{"user": commit.author, "avatar": ""}],
            "date": timestamp(commit.time),
        }
        for commit in history[:HISTORY_PAGE]
    ]


@router.post("/api/kernels/{organization}/{name}/discussions/{number}/merge")
def merge(
    repo_id: RepoId, number: Annotated[int, Path(ge=1, lt=2**31)], hub: TheHub, caller: TheCaller
) -> dict[str, Any]:
    """Bring a pull request onto its branch."""
    return {"success": True, "commitOid": hub.to_write(repo_id, caller).merge(number, caller.name)}


# Reading files


@router.head("/kernels/{organization}/{name}/resolve/{revision}/{path:path}", operation_id="resolve_head")
@router.get("/kernels/{organization}/{name}/resolve/{revision}/{path:path}")
def resolve(
    repo_id: RepoId, revision: Revision, path: EntryPath, request: Request, hub: TheHub, caller: TheCaller
) -> Response:
    """A file of a revision, or a range of it."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.resolve(revision)
    entry = repository.entry(commit, path)
    if entry.is_folder:
        raise no_entry(path, commit)
    return content_response(request, hub, repository, entry, commit)


# Writing files


class Card(Body):
    """A `README.md` that a client is about to commit."""

    content: str


@router.post("/api/validate-yaml")
def validate_yaml(body: Card) -> Response:
    """Whether the front matter of a card can be read; the clients ask before they commit one."""
    match = re.match(r"\A---\r?\n(.*?)\r?\n---\s*(?:\n|\Z)", body.content, re.DOTALL)
    try:
        metadata = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        return JSONResponse({"errors": [{"message": str(error)}], "warnings": []}, status_code=400)
    if not isinstance(metadata, dict):
        errors = [{"message": "the front matter of README.md is not a table of keys and values"}]
        return JSONResponse({"errors": errors, "warnings": []}, status_code=400)
    return JSONResponse({"errors": [], "warnings": []})


class PreuploadFile(Body):
    """A file that a client is going to send."""

    path: str
    size: Annotated[int, Field(ge=0)]
    sample: str = ""


class Preupload(Body):
    """The body of the question how files are to be sent."""

    files: Annotated[list[PreuploadFile], Field(max_length=1000)]


@router.post("/api/kernels/{organization}/{name}/preupload/{revision}")
def preupload(
    repo_id: RepoId, revision: Revision, body: Preupload, hub: TheHub, caller: TheCaller
) -> dict[str, list[dict[str, Any]]]:
    """How each file is to be sent: in the commit itself, or as a large file before it."""
    repository = hub.to_write(repo_id, caller)
    commit = repository.resolve(revision)
    limits = hub.settings.limits
    if sum(file.size for file in body.files) > shutil.disk_usage(hub.root).free:
        raise no_space()  # here, where every client shows the reason
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
        present = repository.find(commit, path)
        oid = None
        if present and not present.is_folder:
            oid = present.large.sha256 if present.large else present.oid
        answer.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
    return {"files": answer}


def _check_metadata(path: str, size: int, limit: int) -> None:
    if path.rpartition("/")[2] == "metadata.json" and size > limit:
        raise too_large(f"{path} has {size} bytes; a metadata.json has at most {limit}: every loader parses it")


class LargeObject(Body):
    """A large file that a client is going to send or read."""

    oid: str
    size: Annotated[int, Field(ge=0)]


class Batch(Body):
    """The body of the LFS batch API."""

    operation: Literal["upload", "download"]
    objects: Annotated[list[LargeObject], Field(max_length=1000)]
    transfers: list[str] = ["basic"]
    hash_algo: str = "sha256"


@router.post("/kernels/{organization}/{name}.git/info/lfs/objects/batch")
def large_file_batch(repo_id: RepoId, body: Batch, request: Request, hub: TheHub, caller: TheCaller) -> JSONResponse:
    """Where to send or read large files; those that are here already need not be sent."""
    uploading = body.operation == "upload"
    repository = hub.to_write(repo_id, caller) if uploading else hub.to_read(repo_id, caller)
    if body.hash_algo != "sha256":
        raise bad_request(f"hash_algo {body.hash_algo!r} is not known; expected 'sha256'")
    limit = hub.settings.limits.file_bytes
    objects: list[dict[str, Any]] = []
    for wanted in body.objects:
        sha256 = names.sha256(wanted.oid)
        item: dict[str, Any] = {"oid": sha256, "size": wanted.size}
        here = repository.owns(sha256) and hub.large_files.size(sha256) == wanted.size
        if uploading and wanted.size > limit:
            item["error"] = {"code": 422, "message": f"{wanted.size} bytes; this Hub takes files up to {limit}"}
        elif not uploading and not here:
            item["error"] = {"code": 404, "message": f"{repo_id} has no large file {sha256}"}
        elif not (uploading and here):
            query = hub.sign(body.operation, repo_id, sha256, wanted.size)
            href = f"{base_url(request)}/api/kernels/{repo_id}/large/{sha256}?{query}"
            item["actions"] = {body.operation: {"href": href, "header": {}}}
            item["authenticated"] = True
        objects.append(item)
    return JSONResponse(
        {"transfer": "basic", "objects": objects, "hash_algo": "sha256"}, media_type="application/vnd.git-lfs+json"
    )


@router.put(
    "/api/kernels/{organization}/{name}/large/{sha256}",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"format": "binary"}}}}},
)
async def receive_large_file(
    repo_id: RepoId,
    sha256: str,
    request: Request,
    hub: TheHub,
    size: Annotated[int, Query(ge=0)],
    expires: int,
    signature: str,
) -> Response:
    """Take in a large file at an address that we signed."""
    hub.check_signature("upload", repo_id, sha256, size, expires, signature)
    slots: Slots = request.app.state.upload_slots
    with slots.one():
        repository = await to_thread.run_sync(hub.repositories.open, repo_id)
        with hub.large_files.receive(sha256, size) as incoming:
            async for block in blocks(request):
                await to_thread.run_sync(incoming.write, block)
            await to_thread.run_sync(incoming.seal)
            await to_thread.run_sync(hub.keep, repository, [incoming])
    request.app.state.measures.received(size)
    return Response(headers={"ETag": f'"{sha256}"'})


@router.get("/api/kernels/{organization}/{name}/large/{sha256}")
def send_large_file(
    repo_id: RepoId,
    sha256: str,
    request: Request,
    hub: TheHub,
    size: Annotated[int, Query(ge=0)],
    expires: int,
    signature: str,
) -> Response:
    """A large file, at an address that we signed."""
    hub.check_signature("download", repo_id, sha256, size, expires, signature)
    repository = hub.repositories.open(repo_id)
    large = LargeFile(sha256, size)
    return content_response(request, hub, repository, Entry(sha256, sha256, False, 0, large), "")


class DuplicateFile(Body):
    """A large file of another repository."""

    sha256: str


class DuplicateTarget(Body):
    """The repository that is to have it as well."""

    type: str
    name: str


class Duplicate(Body):
    """The body of a copy of large files between repositories."""

    target: DuplicateTarget
    files: Annotated[list[DuplicateFile], Field(max_length=1000)]


@router.post("/api/kernels/{organization}/{name}/lfs-files/duplicate")
def duplicate_large_files(repo_id: RepoId, body: Duplicate, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Give another repository large files of this one, without sending them."""
    source = hub.to_read(repo_id, caller)
    _kernels_only(body.target.type)
    target = hub.to_write(_split(body.target.name), caller)
    known = [file.sha256 for file in body.files if source.owns(file.sha256)]
    with hub.keeping():
        target.own(known)
    failed = [
        {"sha256": file.sha256, "error": f"{repo_id} has no such large file"}
        for file in body.files
        if file.sha256 not in known
    ]
    return {"success": not failed, "failed": failed}


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
    create_pr: bool = False,
) -> dict[str, Any]:
    """All of a commit's changes, or none."""
    repository = await to_thread.run_sync(hub.to_write, repo_id, caller)
    repository.resolve(revision)
    slots: Slots = request.app.state.commit_slots
    limits = hub.settings.limits
    header: dict[str, Any] = {}
    changes: list[Change] = []
    with slots.one():
        body = lines(request, longest=limits.inline_file_bytes * 4 // 3 + 8192, total=limits.commit_bytes)
        async for key, value in _operations(body):
            if key == "header":
                header = value
            else:
                changes.append(await to_thread.run_sync(_change, hub, repository, key, value))
            if len(changes) > limits.commit_changes:
                raise too_large(f"more than {limits.commit_changes} changes in one commit")
        title = header.get("summary")
        if not isinstance(title, str) or not title.strip():
            raise bad_request("the commit has no header line with a 'summary'")
        description = header.get("description")
        parent = header.get("parentCommit")

        def write() -> tuple[str, str]:
            return repository.commit(
                revision,
                changes,
                title=title,
                description=description if isinstance(description, str) else "",
                author=caller.name,
                parent=parent if isinstance(parent, str) else None,
                pull_request=create_pr,
            )

        oid, ref = await to_thread.run_sync(write)
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


async def _operations(body: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    async for line in body:
        try:
            item = await to_thread.run_sync(json.loads, line) if len(line) > 65536 else json.loads(line)
            key, value = item["key"], item["value"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise bad_request(f"not a line of a commit: {line[:80]!r}; expected {{'key': …, 'value': …}}") from None
        if not isinstance(key, str) or not isinstance(value, dict):
            raise bad_request(f"not a line of a commit: {line[:80]!r}; expected {{'key': …, 'value': …}}")
        yield key, value


def _change(hub: Hub, repository: Repository, key: str, value: dict[str, Any]) -> Change:
    """One line of a commit. What a file becomes is stored at once; nothing refers to it yet."""
    path = value.get("path")
    if not isinstance(path, str):
        raise bad_request(f"{key}: expected a 'path'")
    limits = hub.settings.limits
    if key in {"deletedFile", "deletedFolder", "deletedEntry"}:
        return Change(names.path(path.rstrip("/")), is_folder=key == "deletedFolder")
    names.path(path)
    if key == "lfsFile":
        large = _large_file(hub, repository, path, value.get("oid"), value.get("size"))
        _check_metadata(path, large.size, limits.metadata_bytes)
        return Change(path, repository.write_blob(large.pointer()))
    if key == "file":
        content = value.get("content")
        if not isinstance(content, str):
            raise bad_request(f"{path}: expected 'content'")
        try:
            encoded = value.get("encoding", "utf-8") == "base64"
            data = base64.b64decode(content, validate=True) if encoded else content.encode()
        except (binascii.Error, ValueError):
            raise bad_request(f"{path}: the content is not what its encoding says") from None
        if len(data) > limits.inline_file_bytes:
            raise too_large(f"{path} has {len(data)} bytes; send files above {limits.inline_file_bytes} as LFS")
        _check_metadata(path, len(data), limits.metadata_bytes)
        if (pointer := read_pointer(data)) is not None:  # what git itself would hold for a large file
            _large_file(hub, repository, path, pointer.sha256, pointer.size)
        return Change(path, repository.write_blob(data))
    raise bad_request(f"{key[:40]!r} is not a change that this Hub knows")


def _large_file(hub: Hub, repository: Repository, path: str, oid: object, size: object) -> LargeFile:
    sha256 = names.sha256(oid)
    stored = hub.large_files.size(sha256) if repository.owns(sha256) else None
    if stored is None or (size is not None and size != stored):
        raise bad_request(f"{path}: the large file {sha256} was not sent to {repository.repo_id}; send it first")
    return LargeFile(sha256, stored)
