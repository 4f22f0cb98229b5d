"""Routes that create, describe, rename and delete repositories, and describe the caller and organizations."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Query, Request
from pydantic import Field, StrictBool
from starlette.responses import JSONResponse

from kernel_hub import names
from kernel_hub.http.turns import in_turn
from kernel_hub.refusals import Refusal, bad_request, no_token
from kernel_hub.routes.parameters import Body, HubRoute, RepoId, Revision, TheCaller, TheHub, kernels_only
from kernel_hub.routes.responses import base_url, next_page, timestamp
from kernel_hub.storage.disk import BLOCK
from kernel_hub.tokens import ANY

router = APIRouter(route_class=HubRoute)


class OldRepository(Body):
    """The body of `delete_repo`."""

    name: str
    organization: str | None = None
    type: str = "model"


class RepositorySettings(Body):
    """The body of `update_repo_settings`."""

    private: StrictBool | None = None
    visibility: Literal["public", "private"] | None = None

    @property
    def is_private(self) -> bool | None:
        """Whether the repository shall be private. None: not stated."""
        return self.visibility == "private" if self.visibility else self.private


class NewRepository(OldRepository, RepositorySettings):
    """The body of `create_repo`."""


class MovedRepository(Body):
    """The body of `move_repo`."""

    from_repo: str = Field(alias="fromRepo")
    to_repo: str = Field(alias="toRepo")
    type: str = "model"


@router.post("/api/repos/create")
def create_repository(body: NewRepository, request: Request, hub: TheHub, caller: TheCaller) -> dict[str, str]:
    """Create a repository."""
    kernels_only(body.type)
    organization = body.organization or caller.name
    if not caller.name:
        raise no_token()
    repo_id = request.state.repository = names.repo_id(organization, body.name)
    hub.must_write(repo_id, caller)
    hub.allowances.check(BLOCK)
    url = f"{base_url(request)}/kernels/{repo_id}"
    try:
        hub.repositories.create(repo_id, private=bool(body.is_private), author=caller.name)
    except Refusal as refusal:  # it exists; clients with exist_ok=True read the address
        refusal.url = url
        raise
    return {"url": url, "name": repo_id, "id": repo_id}


@router.delete("/api/repos/delete")
def delete_repository(body: OldRepository, request: Request, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Delete a repository."""
    kernels_only(body.type)
    repo_id = request.state.repository = names.repo_id(body.organization or caller.name, body.name)
    hub.to_write(repo_id, caller)
    hub.repositories.delete(repo_id)
    return {"success": True}


@router.post("/api/repos/move")
def move_repository(body: MovedRepository, request: Request, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Rename a repository."""
    kernels_only(body.type)
    source, target = names.checked(body.from_repo), names.checked(body.to_repo)
    request.state.repository = f"{source} to {target}"
    hub.to_write(source, caller)
    hub.must_write(target, caller)
    hub.repositories.move(source, target)
    return {"success": True}


@router.put("/api/kernels/{organization}/{name}/settings")
def change_settings(repo_id: RepoId, body: RepositorySettings, hub: TheHub, caller: TheCaller) -> dict[str, bool]:
    """Make a repository private or public."""
    if body.is_private is None:
        raise bad_request("expected 'private' or 'visibility'")
    repository = hub.to_write(repo_id, caller)
    with repository.refs.locked():
        if body.is_private:
            hub.index.hide(repo_id)  # first: the index may not show the name of a private repository
        repository.set_private(body.is_private)
    return {"private": body.is_private}


def _info(repo_id: str, commit: str, modified: int, private: bool) -> dict[str, Any]:
    return {
        "_id": repo_id,
        "id": repo_id,
        "author": repo_id.partition("/")[0],
        "sha": commit,
        "lastModified": timestamp(modified),
        "private": private,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
    }


@router.get("/api/kernels")
@in_turn
def list_kernels(
    request: Request,
    hub: TheHub,
    caller: TheCaller,
    search: str = "",
    author: str = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 500,
    cursor: str = "",
) -> JSONResponse:
    """List the kernels that the caller may see; the header `Link` has the address of the next page."""
    kernels = hub.index.page(caller.seen(), search=search, organization=author, after=cursor, count=limit + 1)
    found = [_info(item.repo_id, item.commit, item.modified, bool(item.private)) for item in kernels[:limit]]
    answer = JSONResponse(found)
    if len(kernels) > limit:
        next_page(request, answer, cursor=kernels[limit - 1].repo_id)
    return answer


@router.get("/api/kernels/{organization}/{name}", operation_id="kernel_info_at_main")
@router.get("/api/models/{organization}/{name}", operation_id="model_info_at_main")
@router.get("/api/kernels/{organization}/{name}/revision/{revision}")
@router.get("/api/models/{organization}/{name}/revision/{revision}")
def kernel_info(repo_id: RepoId, revision: Revision, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Describe a kernel at a revision, without its files: clients of some versions would take them for objects."""
    repository = hub.to_read(repo_id, caller)
    commit = repository.refs.resolve(revision)
    return _info(repo_id, commit, repository.revisions.last_modified(commit), repository.private)


@router.get("/api/whoami-v2")
def whoami(hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Return the name of the token, its organizations and its role: `admin` may write to any, and create new ones."""
    if not caller.name:
        raise no_token()
    role = "write" if "write" in caller.scopes.values() else "read"
    if caller.scopes.get(ANY) == "write":
        role = "admin"
    organizations = caller.organizations()
    if ANY in caller.scopes:
        organizations |= set(hub.index.organizations()) | hub.settings.trusted
    return {
        "type": "user",
        "id": caller.name,
        **_named(caller.name),
        "isPro": False,
        "orgs": [
            {"type": "org", "id": name, **_named(name), "roleInOrg": "write" if caller.may_write(name) else "read"}
            for name in sorted(organizations)
        ],
        "auth": {"type": "access_token", "accessToken": {"displayName": caller.name, "role": role}},
    }


def _named(name: str) -> dict[str, str]:
    return {"name": name, "fullname": name, "avatarUrl": ""}


@router.get("/api/organizations/{organization}/overview")
def organization_overview(organization: str, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Describe an organization, and whether its kernels load without `trust_remote_code`."""
    name = unquote(organization)
    names.repo_id(name, "x")
    kernels = hub.index.count(caller.seen(), name)
    if not kernels and name not in hub.settings.trusted and name not in caller.organizations():
        raise Refusal(404, f"no organization {name!r}, or none that this token may see", code="NotFound")
    return {
        **_named(name),
        "isVerified": name in hub.settings.trusted,
        "numKernels": kernels,
        "trustedKernelPublisher": name in hub.settings.trusted,
    }
