"""Routes of the caller's account and of organisations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kernel_builder.server import names
from kernel_builder.server.receive import segment
from kernel_builder.server.refusals import no_organization, no_token
from kernel_builder.server.routes.parameters import TheCaller, TheHub
from kernel_builder.server.tokens import ANY

router = APIRouter()


@router.get("/api/whoami-v2")
def whoami(hub: TheHub, caller: TheCaller) -> dict[str, Any]:
    """Return the name of the token, its organisations and its role."""
    if not caller.name:
        raise no_token()
    organizations = {name for name in caller.scopes if name != ANY}
    if ANY in caller.scopes:
        organizations |= set(hub.index.organizations()) | hub.settings.trusted
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
    """Describe an organisation, and whether its kernels load without `trust_remote_code`."""
    name = segment(organization)
    names.repo_id(name, "x")
    kernels = hub.index.count(caller.seen(), name)
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
        "numKernels": kernels,
        "trustedKernelPublisher": name in hub.settings.trusted,
    }
