"""Routes that read a revision: folders, files, their content and their history.

Clients before `kernels` 0.14 do not know repositories of type kernel, and ask for models. The addresses of models read
kernels; they do not write.
"""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import parse_qs

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, TypeAdapter

from kernel_hub.git.commits import ATTRIBUTES_OID
from kernel_hub.git.objects import TreeEntry
from kernel_hub.refusals import bad_request, no_entry
from kernel_hub.routes.content import content_response
from kernel_hub.routes.parameters import (
    Body,
    EntryPath,
    RepoId,
    Revision,
    TheCaller,
    TheHub,
    next_page,
    parsed,
    timestamp,
)

router = APIRouter()
models = APIRouter()  # comes last: it matches routes of kernels with an organization or a name `resolve`, too

TREE_PAGE = 1000
HISTORY_PAGE = 50


def _item(entry: TreeEntry) -> dict[str, Any]:
    if entry.is_folder:
        return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
    item = {"type": "file", "oid": entry.oid, "size": entry.content_size, "path": entry.path}
    if entry.large:
        item["lfs"] = {"oid": entry.large.sha256, "size": entry.large.size, "pointerSize": entry.size}
    return item


def _is_hubs_own(entry: TreeEntry) -> bool:
    """Return whether this is the file that tells `git` of large files.

    It is not listed: clients that download only builds would miss it, and find their cache incomplete without a Hub.
    """
    return entry.path == ".gitattributes" and entry.oid == ATTRIBUTES_OID


@router.get("/api/kernels/{organization}/{name}/tree/{revision}", operation_id="list_top")
@router.get("/api/models/{organization}/{name}/tree/{revision}", operation_id="list_model_top")
@router.get("/api/kernels/{organization}/{name}/tree/{revision}/{path:path}")
@router.get("/api/models/{organization}/{name}/tree/{revision}/{path:path}")
def list_folder(
    repo_id: RepoId,
    revision: Revision,
    path: EntryPath,
    request: Request,
    response: Response,
    hub: TheHub,
    caller: TheCaller,
    recursive: bool = False,
    cursor: Annotated[int, Query(ge=0, le=100_000_000)] = 0,
) -> list[dict[str, Any]]:
    """List a folder of a revision."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    entries = repository.revisions.entries(commit, path, recursive=recursive, skip=cursor, count=TREE_PAGE + 1)
    if len(entries) > TREE_PAGE:
        next_page(request, response, cursor=cursor + TREE_PAGE)
    return [_item(entry) for entry in entries[:TREE_PAGE] if not _is_hubs_own(entry)]


class _Paths(Body):
    paths: Annotated[list[str], Field(max_length=TREE_PAGE)]


def _paths(body: bytes, is_json: bool) -> list[str]:
    """Parse the field `paths` of JSON or a form."""
    try:
        form = {} if is_json else {"paths": [], **parse_qs(body.decode(), max_num_fields=2 * TREE_PAGE)}
    except ValueError:
        raise bad_request(f"expected JSON, or a form of at most {2 * TREE_PAGE} fields, with 'paths'") from None
    return parsed(body if is_json else json.dumps(form).encode(), _PATHS_OF_JSON).paths


_PATHS_OF_JSON = TypeAdapter(_Paths)
_PATHS: dict[str, Any] = {
    "requestBody": {"content": {"application/x-www-form-urlencoded": {"schema": {"type": "object"}}}}
}


@router.post("/api/kernels/{organization}/{name}/paths-info/{revision}", openapi_extra=_PATHS)
@router.post("/api/models/{organization}/{name}/paths-info/{revision}", openapi_extra=_PATHS)
async def paths_info(
    repo_id: RepoId, revision: Revision, request: Request, hub: TheHub, caller: TheCaller
) -> list[dict[str, Any]]:
    """Describe the files and folders among `paths` that exist."""
    body = await request.body()
    is_json = request.headers.get("content-type", "").startswith("application/json")

    def look() -> list[dict[str, Any]]:  # which parses in a thread: a form can take seconds
        repository = hub.to_read(repo_id, caller)
        commit = repository.refs.resolve(revision)
        found = repository.revisions.find_all(commit, (path.rstrip("/") for path in _paths(body, is_json)))
        return [_item(entry) for entry in found.values()]

    return await to_thread.run_sync(look)


@router.get("/api/kernels/{organization}/{name}/commits/{revision}")
@router.get("/api/models/{organization}/{name}/commits/{revision}")
def list_commits(
    repo_id: RepoId,
    revision: Revision,
    request: Request,
    response: Response,
    hub: TheHub,
    caller: TheCaller,
    p: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> list[dict[str, Any]]:
    """List the commits of a revision, newest first."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    history = repository.revisions.commits(commit, skip=p * HISTORY_PAGE, count=HISTORY_PAGE + 1)
    if len(history) > HISTORY_PAGE:
        next_page(request, response, p=p + 1)
    return [
        {
            "id": item.oid,
            "title": item.title,
            "message": item.message,
            "authors": [{"user": item.author, "avatar": ""}],
            "date": timestamp(item.time),
        }
        for item in history[:HISTORY_PAGE]
    ]


@router.head("/kernels/{organization}/{name}/resolve/{revision}/{path:path}", operation_id="resolve_head")
@router.get("/kernels/{organization}/{name}/resolve/{revision}/{path:path}")
@models.head("/{organization}/{name}/resolve/{revision}/{path:path}", operation_id="resolve_model_head")
@models.get("/{organization}/{name}/resolve/{revision}/{path:path}")
def resolve(
    repo_id: RepoId, revision: Revision, path: EntryPath, request: Request, hub: TheHub, caller: TheCaller
) -> Response:
    """Send a file of a revision, or a range of it."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    entry = repository.revisions.entry(commit, path)
    if entry.is_folder:
        raise no_entry(path, commit)
    return content_response(request, hub, repository, entry, commit)
