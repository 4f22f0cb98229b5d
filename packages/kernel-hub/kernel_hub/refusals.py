"""Every error response of the Hub, in the form that the public clients read.

The clients choose the exception by the status and `X-Error-Code`, and show `X-Error-Message`.
"""

from __future__ import annotations

import re

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


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
    """Return the answer of a refusal: its message as a header and as JSON."""
    message = _CONTROL.sub(" ", refusal.message).encode("latin-1", "replace").decode("latin-1")
    headers = {**(refusal.headers or {}), "X-Error-Code": refusal.code, "X-Error-Message": message}
    if refusal.status_code in {408, 413, 503}:  # do not wait for the rest of the body
        headers["Connection"] = "close"
    body = {"error": refusal.message.encode("utf-8", "replace").decode()}
    if refusal.url:
        body["url"] = refusal.url
    return JSONResponse(body, status_code=refusal.status_code, headers=headers)


def bad_request(message: str) -> Refusal:
    """Refuse a malformed request: a name, a path or a body."""
    return Refusal(400, message, code="BadRequest")


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
    return Refusal(
        401,
        "Invalid credentials in Authorization header",
        code="InvalidToken",
        headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
    )


def forbidden(message: str) -> Refusal:
    """Refuse a known caller who lacks the permission."""
    return Refusal(403, message, code="Forbidden")


def no_repository(repo_id: str, *, hidden: bool = False) -> Refusal:
    """Report that there is no such repository, or, if it is hidden, none that the caller may see."""
    message = f"no kernel repository {repo_id!r}, or none that this token may see"
    return Refusal(404, message, code="RepoNotFound", hidden=hidden)


def not_supported(message: str) -> Refusal:
    """Refuse a request that only the public Hub supports. The clients do not repeat a request after a 501."""
    return Refusal(501, message, code="NotSupported")


def no_revision(repo_id: str, revision: str) -> Refusal:
    """Report that the repository has no such branch, tag or commit."""
    return Refusal(404, f"{repo_id} has no branch, tag or commit {revision!r}", code="RevisionNotFound")


def no_entry(path: str, commit: str) -> Refusal:
    """Report that the revision has no such file or folder."""
    return Refusal(
        404, f"no file or folder {path!r} at {commit}", code="EntryNotFound", headers={"X-Repo-Commit": commit}
    )


def conflict(message: str) -> Refusal:
    """Refuse to create an item that exists or conflicts with another."""
    return Refusal(409, message, code="Conflict")


def moved_meanwhile(branch: str, head: str, expected: str) -> Refusal:
    """Refuse a commit whose parent is no longer the head of the branch."""
    return Refusal(
        412,
        f"{branch} is at {head}, not at {expected}: another commit came first. Read the branch again and retry.",
        code="PreconditionFailed",
    )


def too_large(message: str) -> Refusal:
    """Refuse a request that exceeds a limit of this Hub."""
    return Refusal(413, message, code="PayloadTooLarge")


def busy(message: str) -> Refusal:
    """Refuse a request for now; the clients retry."""
    return Refusal(503, message, code="Busy", headers={"Retry-After": "2"})
