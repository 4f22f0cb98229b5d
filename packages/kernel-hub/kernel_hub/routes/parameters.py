"""Parameters that many routes share: the Hub, the caller, and the repository, revision and path of an address.

FastAPI runs a plain function in a thread, which takes longer than most of these functions. So functions that do not
block are `async`; `caller_of` may read the token file. `BodyLimits` leaves slashes in the segments of a path encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import iscoroutinefunction
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

from anyio import to_thread
from fastapi import Depends, Path, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from kernel_hub import names
from kernel_hub.http.turns import current_request, in_turn
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import bad_request, invalid, no_token, too_large
from kernel_hub.tokens import Caller

_BRACKETS = 32_000
_GIT_TYPES = {"application/x-git-upload-pack-request", "application/vnd.git-lfs+json"}

Parsed = TypeVar("Parsed")


async def hub_of(request: Request) -> Hub:
    """Return the Hub that this application serves."""
    hub: Hub = request.app.state.hub
    return hub


TheHub = Annotated[Hub, Depends(hub_of)]


async def caller_of(request: Request, hub: TheHub) -> Caller:
    """Return the sender of a request."""
    return await to_thread.run_sync(_find_caller, request, hub, limiter=request.app.state.token_threads)


def _find_caller(request: Request, hub: Hub) -> Caller:
    sent = request.headers.get("authorization")
    by_git = request.headers.get("content-type") in _GIT_TYPES
    if (sent or "").lower().startswith("basic ") and request.method not in {"GET", "HEAD"} and not by_git:
        # A browser adds basic credentials to every form, also to one on a malicious page. No form has git's types.
        raise no_token("send the token as 'Authorization: Bearer …' to change something")
    proxy = request.headers.get("x-hub-proxy-token")
    user, groups = (request.headers.get(name, "") for name in ("x-forwarded-user", "x-forwarded-groups"))
    if proxy is None or sent is not None:
        caller = hub.caller(sent)
    elif request.method in {"GET", "HEAD"} or not user:  # as for basic credentials, no page can forge a change
        caller = hub.tokens.user(proxy, user, groups)
    else:
        raise no_token("users of the proxy's single sign-on only read: send a token to change something")
    request.state.caller, request.state.key = caller.name, caller.key
    return caller


async def repo_of(organization: str, name: str) -> str:
    """Return the id of the repository in the address."""
    return names.repo_id(unquote(organization), unquote(name))


async def revision_of(revision: str = "main") -> str:
    """Return the revision in the address."""
    return unquote(revision)


async def path_of(path: str = "") -> str:
    """Return the path of the file or folder in the address, "" for the top folder."""
    return unquote(path).strip("/")


TheCaller = Annotated[Caller, Depends(caller_of)]
RepoId = Annotated[str, Depends(repo_of)]
Revision = Annotated[str, Depends(revision_of)]
EntryPath = Annotated[str, Depends(path_of)]
Number = Annotated[int, Path(ge=1, lt=2**31)]  # of a pull request


class Body(BaseModel):
    """The body of a request. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: object) -> object:
        """Refuse text with a NUL, where libgit2 would stop reading, and text that cannot be written as UTF-8."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not names.is_text(text):
                raise ValueError("this is not valid UTF-8 text without NUL")
        return value


def parsed(body: bytes, adapter: TypeAdapter[Parsed]) -> Parsed:
    """Parse and validate JSON, without objects for unknown fields.

    Raises:
        Refusal: If it is invalid. Python would take seconds for the objects of a body of brackets.
    """
    if body.count(b"[") + body.count(b"{") > _BRACKETS:
        raise too_large(f"the body has more than {_BRACKETS} brackets")
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None


class HubRoute(APIRoute):
    """A route that runs a plain function in a turn of its caller, and parses a parameter `body` in a thread."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        kind = "quick" if "GET" in options["methods"] else "write"
        super().__init__(path, endpoint if iscoroutinefunction(endpoint) else in_turn(endpoint, kind), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which finds the body already validated."""
        handle = super().get_route_handler()
        adapter = TypeAdapter[Any]((self.body_field and self.body_field.field_info.annotation) or object)

        class JsonRequest(Request):
            async def json(self) -> Any:
                return await to_thread.run_sync(parsed, await self.body(), adapter)

        async def handle_json(request: Request) -> Response:
            current_request.set(request)
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def kernels_only(kind: str) -> None:
    """Raise a refusal unless the type of repository is `kernel`."""
    if kind != "kernel":
        raise bad_request(f"this Hub holds kernels, not repositories of type {kind!r}: pass repo_type='kernel'")
