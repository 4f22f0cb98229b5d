"""Routes of branches, tags and pull requests."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse

from kernel_hub.http.turns import in_turn
from kernel_hub.routes.parameters import Body, HubRoute, Number, RepoId, Revision, TheCaller, TheHub

router = APIRouter(route_class=HubRoute)

_HEADS_OR_TAGS = re.compile("^refs/(heads|tags)/")


class NewBranch(Body):
    """The body of `create_branch`."""

    starting_point: Annotated[str | None, Field(alias="startingPoint", max_length=10_000)] = None
    overwrite: bool = False


class NewTag(Body):
    """The body of `create_tag`."""

    tag: str
    message: str | None = Field(None, max_length=10_000)


@router.get("/api/kernels/{organization}/{name}/refs")
@router.get("/api/models/{organization}/{name}/refs")
@in_turn
def list_refs(repo_id: RepoId, hub: TheHub, caller: TheCaller, include_prs: bool = False) -> JSONResponse:
    """List branches, tags and, if asked for, pull requests."""
    refs = list(hub.to_read(repo_id, caller).refs)

    def listed(prefix: str) -> list[dict[str, str]]:
        found = ((full, commit) for full, commit in refs if full.startswith(prefix))
        return [{"name": _HEADS_OR_TAGS.sub("", full), "ref": full, "targetCommit": commit} for full, commit in found]

    answer = {"branches": listed("refs/heads/"), "tags": listed("refs/tags/"), "converts": []}
    return JSONResponse({**answer, "pullRequests": listed("refs/pr/")} if include_prs else answer)


@router.post("/api/kernels/{organization}/{name}/branch/{revision}")
def create_branch(
    repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller, body: NewBranch | None = None
) -> dict[str, bool]:
    """Create a branch."""
    body = body or NewBranch()
    hub.to_add(repo_id, caller).refs.create_branch(revision, body.starting_point, overwrite=body.overwrite)
    return {"success": True}


@router.delete("/api/kernels/{organization}/{name}/branch/{revision}")
def delete_branch(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Delete a branch."""
    hub.to_write(repo_id, caller).refs.delete("heads", revision)
    return {"success": True}


@router.post("/api/kernels/{organization}/{name}/tag/{revision}")
def create_tag(repo_id: RepoId, revision: Revision, body: NewTag, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Tag a revision."""
    hub.to_add(repo_id, caller).refs.create_tag(body.tag, revision, body.message, caller.name)
    return {"success": True}


@router.delete("/api/kernels/{organization}/{name}/tag/{revision}")
def delete_tag(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Delete a tag."""
    hub.to_write(repo_id, caller).refs.delete("tags", revision)
    return {"success": True}


@router.delete("/api/kernels/{organization}/{name}/discussions/{number}")
def delete_pull_request(repo_id: RepoId, number: Number, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Delete a pull request: with write access, or with the token that opened it."""
    hub.to_commit(repo_id, caller, f"refs/pr/{number}", create_pr=False).commits.delete_pull_request(number)
    return {"success": True}


@router.post("/api/kernels/{organization}/{name}/discussions/{number}/merge")
def merge(repo_id: RepoId, number: Number, commit: str, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Merge a pull request into its branch, if it is still at the commit that was reviewed."""
    with hub.allowances.claim() as claim:
        oid = hub.to_add(repo_id, caller).commits.merge(number, commit, caller.name, claim)
    return {"success": True, "commitOid": oid}
