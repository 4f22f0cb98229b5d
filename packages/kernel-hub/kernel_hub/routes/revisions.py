"""Routes that read a revision: folders, files, their content and their history.

Clients before `kernels` 0.14 do not know repositories of type kernel, and ask for models. The addresses of models read
kernels; they do not write.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, TypeAdapter
from starlette.responses import JSONResponse

from kernel_hub.git.commits import ATTRIBUTES_OID
from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.revisions import QUICK_BYTES, TREE_BYTES
from kernel_hub.http.turns import in_turn, take_turn
from kernel_hub.refusals import Refusal, bad_request, no_entry
from kernel_hub.routes.parameters import Body, EntryPath, HubRoute, RepoId, Revision, TheCaller, TheHub, parsed
from kernel_hub.routes.responses import content_response, next_page, timestamp

router = APIRouter(route_class=HubRoute)
# Comes last: it matches routes of kernels with an organization or a name `resolve`, too.
models = APIRouter(route_class=HubRoute)

TREE_PAGE = 1000
HISTORY_PAGE = 50


def _item(entry: TreeEntry) -> dict[str, Any]:
    if entry.is_folder:
        return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
    item = {"type": "file", "oid": entry.oid, "size": entry.content_size, "path": entry.path}
    if entry.large:
        item["lfs"] = {"oid": entry.large.sha256, "size": entry.large.size, "pointerSize": entry.size}
    return item


@router.get("/api/kernels/{organization}/{name}/tree/{revision}", operation_id="list_top")
@router.get("/api/models/{organization}/{name}/tree/{revision}", operation_id="list_model_top")
@router.get("/api/kernels/{organization}/{name}/tree/{revision}/{path:path}")
@router.get("/api/models/{organization}/{name}/tree/{revision}/{path:path}")
@in_turn
def list_folder(
    repo_id: RepoId,
    revision: Revision,
    path: EntryPath,
    request: Request,
    hub: TheHub,
    caller: TheCaller,
    recursive: bool = False,
    cursor: str = "",
) -> JSONResponse:
    """List a folder of a revision; `cursor` is the path in the folder of the entry before, as `Link` states it."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    entries = repository.revisions.entries(commit, path, recursive=recursive, after=cursor, count=TREE_PAGE + 1)
    # Clients that download only builds would miss the Hub's own file, and find their cache incomplete without a Hub.
    own = (".gitattributes", ATTRIBUTES_OID)
    response = JSONResponse([_item(entry) for entry in entries[:TREE_PAGE] if (entry.path, entry.oid) != own])
    if len(entries) > TREE_PAGE:
        last = entries[TREE_PAGE - 1]
        next_page(request, response, cursor=last.path.removeprefix(f"{path}/") + "/" * last.is_folder)
    return response


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
) -> JSONResponse:
    """Describe the files and folders among `paths` that exist."""
    body = await request.body()
    is_json = request.headers.get("content-type", "").startswith("application/json")

    def look() -> JSONResponse:  # which also parses: a form can take seconds
        repository = hub.to_read(repo_id, caller)
        commit = repository.refs.resolve(revision)
        found = repository.revisions.find_all(commit, (path.rstrip("/") for path in _paths(body, is_json)))
        return JSONResponse([_item(entry) for entry in found.values()])

    return await take_turn(look)


@router.get("/api/kernels/{organization}/{name}/commits/{revision}")
@router.get("/api/models/{organization}/{name}/commits/{revision}")
@in_turn
def list_commits(
    repo_id: RepoId,
    revision: Revision,
    request: Request,
    hub: TheHub,
    caller: TheCaller,
    p: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> JSONResponse:
    """List the commits of a revision, newest first."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    history = repository.revisions.commits(commit, skip=p * HISTORY_PAGE, count=HISTORY_PAGE + 1)
    commits = [
        {
            "id": item.oid,
            "title": item.title,
            "message": item.message,
            "authors": [{"user": item.author, "avatar": ""}],
            "date": timestamp(item.time),
        }
        for item in history[:HISTORY_PAGE]
    ]
    response = JSONResponse(commits)
    if len(history) > HISTORY_PAGE:
        next_page(request, response, p=p + 1)
    return response


@router.head("/kernels/{organization}/{name}/resolve/{revision}/{path:path}", operation_id="resolve_head")
@router.get("/kernels/{organization}/{name}/resolve/{revision}/{path:path}")
@models.head("/{organization}/{name}/resolve/{revision}/{path:path}", operation_id="resolve_model_head")
@models.get("/{organization}/{name}/resolve/{revision}/{path:path}")
async def resolve(
    repo_id: RepoId, revision: Revision, path: EntryPath, request: Request, hub: TheHub, caller: TheCaller
) -> Response:
    """Send a file of a revision, or a range of it."""

    def find(most: int) -> Response:
        repository = hub.to_read(repo_id, caller)
        repository.revisions.unread = most
        commit = repository.refs.resolve(revision)
        entry = repository.revisions.entry(commit, path)
        if entry.is_folder:
            raise no_entry(path, commit)
        return content_response(request, hub, repository, entry, commit)

    try:
        return await take_turn(partial(find, QUICK_BYTES), "quick")
    except Refusal as refusal:
        if refusal.status_code != 413:
            raise
    return await take_turn(partial(find, TREE_BYTES))
