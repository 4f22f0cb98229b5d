"""Every answer of the Hub that is a refusal, in the terms that the public clients read.

The clients look at the status, then at `X-Error-Code` (which exception to raise) and `X-Error-Message` (what to
show). A message says what was expected and what to do.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException


class Refusal(HTTPException):
    """A request that the Hub does not carry out, with its status, code and reason.

    Args:
        status: The HTTP status.
        message: What was expected and what to do.
        code: What the clients choose their exception by.
        headers: Headers that the answer carries besides.
        url: Where the thing is that stands in the way; the clients read it when they allow for that.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        headers: dict[str, str] | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(status_code=status, detail=message, headers=headers)
        self.message = message
        self.code = code
        self.url = url


def bad_request(message: str) -> Refusal:
    """The request itself is wrong: a name, a path, a body."""
    return Refusal(400, message, code="BadRequest")


def no_token(message: str = "this needs a token: pass token=… or set HF_TOKEN") -> Refusal:
    """Who asks is not known."""
    return Refusal(401, message, code="Unauthorized", headers={"WWW-Authenticate": "Bearer"})


def wrong_token() -> Refusal:
    """A token that this Hub does not know. By this very message the clients tell it from a missing repository."""
    return Refusal(
        401,
        "Invalid credentials in Authorization header",
        code="InvalidToken",
        headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
    )


def forbidden(message: str) -> Refusal:
    """Who asks is known, and may not."""
    return Refusal(403, message, code="Forbidden")


def no_repository(repo_id: str) -> Refusal:
    """There is no such repository, or none that the caller may know of."""
    return Refusal(404, f"no kernel repository {repo_id!r}, or none that this token may see", code="RepoNotFound")


def no_organization(name: str) -> Refusal:
    """There is no such organisation, or none that the caller may know of."""
    return Refusal(404, f"no organisation {name!r}, or none that this token may see", code="NotFound")


def no_revision(repo_id: str, revision: str) -> Refusal:
    """The repository has no such branch, tag or commit."""
    return Refusal(404, f"{repo_id} has no branch, tag or commit {revision!r}", code="RevisionNotFound")


def no_entry(path: str, commit: str) -> Refusal:
    """The revision has no such file or folder."""
    return Refusal(
        404, f"no file or folder {path!r} at {commit}", code="EntryNotFound", headers={"X-Repo-Commit": commit}
    )


def conflict(message: str, *, url: str | None = None) -> Refusal:
    """It is there already, or in the way."""
    return Refusal(409, message, code="Conflict", url=url)


def moved_meanwhile(branch: str, head: str, expected: str) -> Refusal:
    """The branch is not where the caller last saw it."""
    return Refusal(
        412,
        f"{branch} is at {head}, not at {expected}: another commit came first. Read the branch again and retry.",
        code="PreconditionFailed",
    )


def too_large(message: str) -> Refusal:
    """More than this Hub's limits allow."""
    return Refusal(413, message, code="PayloadTooLarge")


def too_slow() -> Refusal:
    """A body that stopped coming, or that takes for ever."""
    message = "the body stopped coming, or came too slowly; nothing was stored. Send it again."
    return Refusal(408, message, code="RequestTimeout")


def busy(message: str) -> Refusal:
    """Too much at once; the clients retry."""
    return Refusal(503, message, code="Busy", headers={"Retry-After": "2"})


def read_only() -> Refusal:
    """The Hub was started with --read-only."""
    return Refusal(403, "this Hub is read-only", code="ReadOnly")


def no_space(status: int = 507) -> Refusal:
    """The Hub's disk is full."""
    return Refusal(status, "the Hub has no space left; nothing was stored", code="InsufficientStorage")
