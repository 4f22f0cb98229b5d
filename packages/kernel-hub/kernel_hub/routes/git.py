"""`git clone` and `git fetch` over HTTP, by git's smart protocol. Nothing can be pushed.

Large files are LFS pointers in git; the LFS batch API serves their contents.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Annotated

import anyio
from anyio import to_thread
from anyio.abc import Process
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kernel_hub.git.command import git_command, git_environment, limit
from kernel_hub.http.receive import Slots
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Moved, Refusal, bad_request, forbidden, mirrored, no_token, too_large
from kernel_hub.routes.parameters import RepoId, TheCaller, TheHub
from kernel_hub.tokens import Caller

# Of two paths of one function, the lower decorator's is tried first: a name with .git at its end.
router = APIRouter(include_in_schema=False)

SECONDS = 600  # the longest fetch
CPU_SECONDS = 60  # of each process of git
MEMORY_BYTES = 2 << 30  # of each process of git
REQUEST_BYTES = 4 << 20
BLOCK = 64 << 10

_PROTOCOLS = {"version=1", "version=2"}
_NO_CACHE = {"Cache-Control": "no-cache"}
_PUSH = "this Hub takes no pushes: publish with `kernel-builder upload` or huggingface_hub"
_UPLOAD_PACK = git_command(
    *("upload-pack", "--strict", "--stateless-rpc"),
    settings=(
        "pack.windowMemory=64m",
        "uploadpack.allowFilter=true",
        # Other filters match patterns, which can take minutes.
        "uploadpackfilter.allow=false",
        "uploadpackfilter.blob:none.allow=true",
        "uploadpackfilter.blob:limit.allow=true",
        "uploadpackfilter.tree.allow=true",
    ),
)


def _environment(request: Request) -> dict[str, str]:
    protocol = request.headers.get("git-protocol", "")
    return {**git_environment(), "GIT_PROTOCOL": protocol} if protocol in _PROTOCOLS else git_environment()


async def _path(request: Request, hub: Hub, repo_id: str, caller: Caller) -> str:
    """Return the directory of a repository that the caller may read."""
    try:
        repository = await to_thread.run_sync(hub.to_read, repo_id, caller)
        if (url := repository.mirror_of) is not None:  # a clone would have packages that were not checked
            raise mirrored(repo_id, url)
        return str(repository.path)
    except Refusal as refusal:
        by_git = request.headers.get("user-agent", "").startswith("git/")
        if isinstance(refusal, Moved) or refusal.code != "RepoNotFound" or caller.name or not by_git:
            raise
        # git asks for a password after a 401. A private repository answers as one that does not exist.
        missing = no_token(f"no public kernel repository {repo_id!r}; a private one needs a token as the password")
        missing.headers = {"WWW-Authenticate": 'Basic realm="a Hub; the password is a token"'}
        missing.hidden = refusal.hidden
        raise missing from None


@router.get("/kernels/{organization}/{name}/info/refs")
@router.get("/kernels/{organization}/{name}.git/info/refs")
async def git_refs(
    repo_id: RepoId, request: Request, hub: TheHub, caller: TheCaller, service: Annotated[str, Query()] = ""
) -> Response:
    """List the refs, as the first request of `git clone`."""
    path = await _path(request, hub, repo_id, caller)
    if service == "git-receive-pack":
        raise forbidden(_PUSH)
    if service != "git-upload-pack":
        raise bad_request("this Hub speaks git's smart protocol only: use git 1.6.6 or later")
    slots: Slots = request.app.state.git_slots
    with slots.hold(_client(request, caller)):
        process = await _started(request, "--http-backend-info-refs", path)
        try:
            blocks = [block async for block in _output(process, b"")]
        finally:
            await _end(process)
    media = "application/x-git-upload-pack-advertisement"
    return Response(b"001e# service=git-upload-pack\n0000" + b"".join(blocks), media_type=media, headers=_NO_CACHE)


@router.post("/kernels/{organization}/{name}/git-upload-pack")
@router.post("/kernels/{organization}/{name}.git/git-upload-pack")
async def git_upload_pack(repo_id: RepoId, request: Request, hub: TheHub, caller: TheCaller) -> Response:
    """Send the objects that a clone or fetch asks for."""
    path = await _path(request, hub, repo_id, caller)
    if request.headers.get("content-type") != "application/x-git-upload-pack-request":
        raise bad_request("expected a body of the type application/x-git-upload-pack-request")
    body = await request.body()
    if request.headers.get("content-encoding") in {"gzip", "x-gzip"}:
        body = _unpacked(body)
    with ExitStack() as held:
        slots: Slots = request.app.state.git_slots
        held.enter_context(slots.hold(_client(request, caller)))
        return _Pack(await _started(request, path), body, held.pop_all())


def _client(request: Request, caller: Caller) -> str:
    return caller.name or (request.client.host if request.client else "")


class _Pack(StreamingResponse):
    """The answer of a process of git. It holds a slot, and ends the process, whenever the client goes."""

    def __init__(self, process: Process, body: bytes, held: ExitStack) -> None:
        media_type = "application/x-git-upload-pack-result"
        super().__init__(_output(process, body), media_type=media_type, headers=_NO_CACHE)
        self._process = process
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await _end(self._process)


@router.post("/kernels/{organization}/{name}/git-receive-pack")
@router.post("/kernels/{organization}/{name}.git/git-receive-pack")
def git_receive_pack(repo_id: RepoId, hub: TheHub, caller: TheCaller) -> Response:
    """Refuse a push."""
    hub.to_read(repo_id, caller)
    raise forbidden(_PUSH)


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(wbits=31)
    try:
        data = unpacking.decompress(body, REQUEST_BYTES)
    except zlib.error:
        raise bad_request("the body is not gzip, which its Content-Encoding says") from None
    if unpacking.unconsumed_tail:
        raise too_large(f"the request of git is larger than {REQUEST_BYTES} bytes")
    if not unpacking.eof:
        raise bad_request("the body ends before its gzip does")
    return data


async def _started(request: Request, *arguments: str) -> Process:
    try:
        process = await anyio.open_process(
            [*_UPLOAD_PACK, *arguments], env=_environment(request), stderr=subprocess.DEVNULL, start_new_session=True
        )
    except FileNotFoundError:
        raise Refusal(501, "the machine of this Hub has no git, which clones need", code="NotSupported") from None
    limit(process.pid, {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: MEMORY_BYTES})
    return process


async def _output(process: Process, body: bytes) -> AsyncIterator[bytes]:
    """Write the body to a process and yield what it answers, until the time is over."""
    assert process.stdin is not None and process.stdout is not None
    until = time.monotonic() + SECONDS
    with anyio.move_on_after(SECONDS), suppress(anyio.BrokenResourceError):
        await process.stdin.send(body)  # git reads the whole request before it answers
        await process.stdin.aclose()
    while True:
        block = b""
        with anyio.move_on_after(until - time.monotonic()), suppress(anyio.EndOfStream):
            block = await process.stdout.receive(BLOCK)
        if not block:
            return
        yield block


async def _end(process: Process) -> None:
    """Kill a process and its children, if it still runs. Children that it left behind end at a broken pipe."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    with anyio.CancelScope(shield=True):
        await process.aclose()
