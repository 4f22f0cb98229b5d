"""Every error response of the Hub, in the form that the public clients read.

The clients choose the exception by the status and `X-Error-Code`, and show `X-Error-Message`.
"""

from __future__ import annotations

import re
from functools import partial

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OTHER_REPOSITORY = re.compile(r"/api/(models|datasets|spaces)/[^/]+/[^/]+")
_OTHER_KIND = re.compile(r"/api/(models|datasets|spaces|buckets)(/|$)")
_XET = re.compile(r"/api/kernels/[^/]+/[^/]+/xet-")


class Refusal(HTTPException):
    """An error answer: the request was refused.

    Args:
        status: The HTTP status.
        message: The expected value and the remedy.
        code: The code by which the clients choose their exception.
        headers: Additional headers of the answer.
        hidden: Whether the answer hides a private repository. Only the audit log says so.

    Attributes:
        url: The address of the existing item that conflicts, which the clients read for `exist_ok=True`.
    """

    url: str | None = None

    def __init__(
        self, status: int, message: str, *, code: str, headers: dict[str, str] | None = None, hidden: bool = False
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        self.message = message
        self.code = code
        self.hidden = hidden


def answer(refusal: Refusal) -> Response:
    """Return the answer of a refusal: its message as JSON, and the start as a header, since proxies limit heads."""
    message = _CONTROL.sub(" ", refusal.message[:1000]).encode("latin-1", "replace").decode("latin-1")
    headers = {**(refusal.headers or {}), "X-Error-Code": refusal.code, "X-Error-Message": message}
    if refusal.status_code in {408, 413, 503}:  # do not wait for the rest of the body
        headers["Connection"] = "close"
    body = {"error": refusal.message.encode("utf-8", "replace").decode()}
    if refusal.url:
        body["url"] = refusal.url
    return JSONResponse(body, status_code=refusal.status_code, headers=headers)


bad_request = partial(Refusal, 400, code="BadRequest")  # a malformed name, path or body
forbidden = partial(Refusal, 403, code="Forbidden")  # a known caller lacks the permission
conflict = partial(Refusal, 409, code="Conflict")  # the item exists, or conflicts with another
too_large = partial(Refusal, 413, code="PayloadTooLarge")  # the request exceeds a limit of this Hub
not_supported = partial(Refusal, 501, code="NotSupported")  # clients do not repeat a request after a 501
busy = partial(Refusal, 503, code="Busy", headers={"Retry-After": "2"})  # clients retry


def invalid(error: ValidationError | RequestValidationError) -> Refusal:
    """Refuse a body or parameters that pydantic refuses."""
    first = error.errors()[0]
    return bad_request(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}")


def no_token(
    message: str = "this needs a token: pass token=… or set HF_TOKEN",
    *,
    challenge: str = "Bearer",
    hidden: bool = False,
) -> Refusal:
    """Refuse a caller without a token. `challenge` names the scheme by which git or a browser sends one."""
    return Refusal(401, message, code="Unauthorized", headers={"WWW-Authenticate": challenge}, hidden=hidden)


def wrong_token() -> Refusal:
    """Refuse an unknown token. The clients tell it from a missing repository by exactly this message."""
    headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
    return Refusal(401, "Invalid credentials in Authorization header", code="InvalidToken", headers=headers)


def no_repository(repo_id: str, *, hidden: bool = False) -> Refusal:
    """Report that there is no such repository, or, if it is hidden, none that the caller may see."""
    message = f"no kernel repository {repo_id!r}, or none that this token may see"
    return Refusal(404, message, code="RepoNotFound", hidden=hidden)


def no_revision(repo_id: str, revision: str) -> Refusal:
    """Report that the repository has no such branch, tag or commit."""
    return Refusal(404, f"{repo_id} has no branch, tag or commit {revision!r}", code="RevisionNotFound")


def no_entry(path: str, commit: str) -> Refusal:
    """Report that the revision has no such file or folder."""
    headers = {"X-Repo-Commit": commit}
    return Refusal(404, f"no file or folder {path!r} at {commit}", code="EntryNotFound", headers=headers)


def moved_meanwhile(branch: str, head: str, expected: str) -> Refusal:
    """Refuse a commit whose parent is no longer the head of the branch."""
    advice = "another commit came first. Read the branch again and retry."
    return Refusal(412, f"{branch} is at {head}, not at {expected}: {advice}", code="PreconditionFailed")


def no_route(method: str, path: str) -> Refusal:
    """Refuse a request for which there is no route, such as those that only the public Hub has."""
    kernels_only = "this Hub holds kernels only: pass repo_type='kernel'"
    if _OTHER_REPOSITORY.match(path):  # with this code the clients report that the repository does not exist
        return Refusal(404, kernels_only, code="RepoNotFound")
    if _OTHER_KIND.match(path):
        return not_supported(kernels_only)
    if _XET.match(path):
        return not_supported("this Hub does not support Xet: set HF_HUB_DISABLE_XET=1 to upload files above 512 MB")
    if path.startswith("/api/"):
        return not_supported(f"this Hub has no route {method} {path[:200]}; /openapi.json describes its routes")
    return Refusal(404, f"no page {path[:200]}; / lists the kernels", code="NotFound")
