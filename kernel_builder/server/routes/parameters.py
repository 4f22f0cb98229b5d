"""What every route is told: the Hub, who asks, and which repository, revision and path."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict

from kernel_builder.server import names
from kernel_builder.server.hub_service import Hub
from kernel_builder.server.receive import segment
from kernel_builder.server.refusals import bad_request, no_token
from kernel_builder.server.tokens import Caller


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


def kernels_only(kind: str) -> None:
    if kind != "kernel":
        raise bad_request(f"this Hub holds kernels, not repositories of type {kind!r}: pass repo_type='kernel'")


def split(repo_id: str) -> str:
    organization, _, name = repo_id.partition("/")
    return names.repo_id(organization, name)
