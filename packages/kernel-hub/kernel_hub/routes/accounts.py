"""Routes of the caller's account and of organisations."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from kernel_hub import names
from kernel_hub.http.receive import segment
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import forbidden, no_organization, no_token, no_user
from kernel_hub.routes.parameters import RepoId, TheCaller, TheHub, next_page, timestamp
from kernel_hub.tokens import ANY, Caller

router = APIRouter()

REPOSITORIES_PAGE = 500


@router.get("/api/whoami-v2")
def whoami(hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Return the name of the token, its organisations and its role: `admin` may write to any, also to a new one."""
    if not caller.name:
        raise no_token()
    role = "write" if "write" in caller.scopes.values() else "read"
    if caller.scopes.get(ANY) == "write":
        role = "admin"
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
            for name in _organizations(hub, caller)
        ],
        "auth": {"type": "access_token", "accessToken": {"displayName": caller.name, "role": role}},
    }


def _organizations(hub: Hub, caller: Caller) -> list[str]:
    """Return the organisations that a token has a scope for, sorted."""
    organizations = caller.organizations()
    if ANY in caller.scopes:
        organizations |= set(hub.index.organizations()) | hub.settings.trusted
    return sorted(organizations)


@router.get("/api/organizations/{organization}/overview")
def organization_overview(organization: str, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Describe an organisation, and whether its kernels load without `trust_remote_code`."""
    name = segment(organization)
    names.repo_id(name, "x")
    kernels = hub.index.count(caller.seen(), name)
    if not kernels and name not in hub.settings.trusted and name not in caller.organizations():
        raise no_organization(name)
    return {
        "name": name,
        "fullname": name,
        "avatarUrl": "",
        "isVerified": name in hub.settings.trusted,
        "numModels": 0,
        "numDatasets": 0,
        "numSpaces": 0,
        "numKernels": kernels,
        "trustedKernelPublisher": name in hub.settings.trusted,
    }


# A token stands for a user. Who has a token for an organisation sees the names of its other tokens.


def _user(name: str) -> dict[str, Any]:
    return {"user": name, "fullname": name, "avatarUrl": "", "type": "user", "isPro": False}


@router.get("/api/organizations/{organization}/members")
def organization_members(organization: str, hub: TheHub, caller: TheCaller) -> list[dict[str, Any]]:
    """List the tokens that have a scope for an organisation, to those that have one as well."""
    name = segment(organization)
    names.repo_id(name, "x")
    if not caller.name:
        raise no_token()
    if not caller.may_see(name):
        raise forbidden(f"the token {caller.name!r} has no scope for {name}, so it does not see its members")
    return [
        _user(member.name) for member in hub.tokens.callers() if name in member.organizations() or ANY in member.scopes
    ]


def _known(name: str, hub: Hub, caller: Caller) -> Caller:
    """Return the user with this name if it is the caller, or has an organisation in common with the caller."""
    if not caller.name:
        raise no_token()
    for user in hub.tokens.callers():
        common = set(_organizations(hub, user)) & set(_organizations(hub, caller))
        if user.name == name and (name == caller.name or common):
            return user
    raise no_user(name)


@router.get("/api/users/{user}/overview")
def user_overview(user: str, hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Describe the user that a token stands for, and the organisations that the caller has in common with it."""
    known = _known(segment(user), hub, caller)
    common = set(_organizations(hub, known)) & set(_organizations(hub, caller))
    counts = dict.fromkeys(("numModels", "numDatasets", "numSpaces", "numLikes", "numFollowers", "numFollowing"), 0)
    orgs = [{"name": name, "fullname": name, "avatarUrl": ""} for name in sorted(common)]
    return {**_user(known.name), **counts, "orgs": orgs}


@router.get("/api/users/{user}/{relation}")
def user_relations(
    user: str, relation: Literal["likes", "followers", "following"], hub: TheHub, caller: TheCaller
) -> list[dict[str, Any]]:
    """Answer with an empty list: nobody likes or follows on this Hub."""
    _known(segment(user), hub, caller)
    return []


@router.get("/api/organizations/{organization}/followers")
def organization_followers(organization: str, hub: TheHub, caller: TheCaller) -> list[dict[str, Any]]:
    """Answer with an empty list: nobody follows on this Hub."""
    organization_overview(organization, hub, caller)
    return []


@router.get("/api/kernels/{organization}/{name}/likers")
def kernel_likers(repo_id: RepoId, hub: TheHub, caller: TheCaller) -> list[dict[str, Any]]:
    """Answer with an empty list: nobody likes on this Hub."""
    hub.to_read(repo_id, caller)
    return []


@router.get("/api/settings/repositories")
def own_repositories(
    request: Request, response: Response, hub: TheHub, caller: TheCaller, cursor: str = ""
) -> list[dict[str, Any]]:
    """List the repositories that the token may write to, with the bytes that each stores."""
    if not caller.name:
        raise no_token()
    return _stored(request, response, hub, caller, cursor)


@router.get("/api/organizations/{organization}/settings/repositories")
def organization_repositories(
    organization: str, request: Request, response: Response, hub: TheHub, caller: TheCaller, cursor: str = ""
) -> list[dict[str, Any]]:
    """List the repositories of an organisation that the token may write to, with the bytes that each stores."""
    name = segment(organization)
    names.repo_id(name, "x")
    if not any(scope == "write" and what.startswith(f"{name}/") for what, scope in caller.scopes.items()):
        caller.must_write(name)
    return _stored(request, response, hub, caller, cursor, name)


def _stored(
    request: Request, response: Response, hub: Hub, caller: Caller, cursor: str, organization: str = ""
) -> list[dict[str, Any]]:
    writable = None if caller.scopes.get(ANY) == "write" else [n for n, s in caller.scopes.items() if s == "write"]
    repositories = hub.index.page(
        caller.seen(), within=writable, organization=organization, after=cursor, count=REPOSITORIES_PAGE + 1
    )
    if len(repositories) > REPOSITORIES_PAGE:
        next_page(request, response, cursor=repositories[REPOSITORIES_PAGE - 1].repo_id)
    quota = hub.settings.quotas.repository_bytes
    return [
        {
            "id": item.repo_id,
            "type": "kernel",
            "updatedAt": timestamp(item.changed),
            "visibility": "private" if item.private else "public",
            "storage": item.bytes,
            "storagePercent": round(100 * item.bytes / quota, 2) if quota else 0,
        }
        for item in repositories[:REPOSITORIES_PAGE]
    ]
