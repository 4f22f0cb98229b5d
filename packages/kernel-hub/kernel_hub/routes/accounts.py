"""Routes of the caller's account and of organizations."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter

from kernel_hub import names
from kernel_hub.refusals import Refusal, no_token
from kernel_hub.routes.parameters import HubRoute, TheCaller, TheHub
from kernel_hub.tokens import ANY

router = APIRouter(route_class=HubRoute)


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
        "numModels": 0,
        "numDatasets": 0,
        "numSpaces": 0,
        "numKernels": kernels,
        "trustedKernelPublisher": name in hub.settings.trusted,
    }
