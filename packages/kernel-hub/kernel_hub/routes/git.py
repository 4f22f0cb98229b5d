"""`git clone` and `git fetch` over HTTP, by git's smart protocol. Pushes are refused.

Large files are LFS pointers in git; the LFS batch API serves their contents.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import zlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import Annotated

import anyio
from anyio import to_thread
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Send

from kernel_hub.git.command import git_command, git_environment
from kernel_hub.http.turns import has_too_many, take_turn, turn
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal, bad_request, forbidden, no_token, not_supported, too_large
from kernel_hub.routes.parameters import HubRoute, RepoId, TheCaller, TheHub
from kernel_hub.tokens import Caller

# Of two paths of one function, the lower decorator's is tried first: a name with .git at its end.
router = APIRouter(route_class=HubRoute, include_in_schema=False)

SECONDS = 600  # the longest fetch
SHARED_SECONDS = 60  # the same, while others wait and the caller has more than its equal part
SLOWEST = 32 << 10  # bytes that a client must read in a second, on average
SPARE_SECONDS = 30  # for which it may read less
CPU_SECONDS = 60  # of each process of git
MEMORY_BYTES = 2 << 30  # of each process of git
REQUEST_BYTES = 4 << 20
PREFIXES = 1000  # in one request: git compares each with each ref

_PROTOCOLS = {"version=1", "version=2"}
_PUSH = "this Hub does not accept pushes: publish with `kernel-builder upload` or huggingface_hub"
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


async def _path(request: Request, hub: Hub, repo_id: str, caller: Caller) -> str:
    """Return the directory of a repository that the caller may read."""
    try:
        return str((await take_turn(partial(hub.to_read, repo_id, caller), "quick")).path)
    except Refusal as refusal:
        by_git = request.headers.get("user-agent", "").startswith("git/")
        if refusal.code != "RepoNotFound" or caller.name or not by_git:
            raise
        # git asks for a password after a 401. A private repository answers as one that does not exist.
        raise no_token(
            f"no public kernel repository {repo_id!r}; a private one needs a token as the password",
            challenge='Basic realm="a Hub; the password is a token"',
            hidden=refusal.hidden,
        ) from None


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
    refs = await _refs(request, path, b"", "--http-backend-info-refs")
    media = "application/x-git-upload-pack-advertisement"
    return Response(b"001e# service=git-upload-pack\n0000" + refs, media_type=media)


@router.post("/kernels/{organization}/{name}/git-upload-pack")
@router.post("/kernels/{organization}/{name}.git/git-upload-pack")
async def git_upload_pack(repo_id: RepoId, request: Request, hub: TheHub, caller: TheCaller) -> Response:
    """Send the objects that a clone or fetch asks for."""
    path = await _path(request, hub, repo_id, caller)
    if request.headers.get("content-type") != "application/x-git-upload-pack-request":
        raise bad_request("expected a body of the type application/x-git-upload-pack-request")
    body = await request.body()
    if request.headers.get("content-encoding") in {"gzip", "x-gzip"}:
        body = await to_thread.run_sync(_unpacked, body)
    if body.count(b"ref-prefix") > PREFIXES:
        raise too_large(f"the request of git has more than {PREFIXES} prefixes of refs")
    media = "application/x-git-upload-pack-result"
    if body[4:].startswith(b"command=ls-refs"):  # of a public repository, git asks without its token
        return Response(await _refs(request, path, body), media_type=media)
    return _ReadInTime(_run_git(request, path, body, "clone"), media_type=media)


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


class _ReadInTime(StreamingResponse):
    """A response that ends if it takes too long, or its client reads too slowly: it holds a process of git."""

    body_iterator: AsyncGenerator[bytes, None]

    async def stream_response(self, send: Send) -> None:
        spare: float = SPARE_SECONDS

        async def send_in_time(message: Message) -> None:
            nonlocal spare
            began = anyio.current_time()
            with anyio.fail_after(spare):
                await send(message)
            spare = min(SPARE_SECONDS, spare + began - anyio.current_time() + len(message.get("body", b"")) / SLOWEST)

        with suppress(TimeoutError), anyio.fail_after(SECONDS):
            async with aclosing(self.body_iterator):
                await super().stream_response(send_in_time)


async def _refs(request: Request, path: str, body: bytes, *options: str) -> bytes:
    """Return git's whole response about refs, so that no process waits for its reader."""
    with anyio.fail_after(SECONDS):
        return b"".join([block async for block in _run_git(request, path, body, "refs", *options)])


async def _run_git(request: Request, path: str, body: bytes, kind: str, *options: str) -> AsyncGenerator[bytes, None]:
    """Yield `git upload-pack`'s response, within limits of processor time and memory. It ends with this generator."""
    protocol = request.headers.get("git-protocol", "")
    async with turn(request, kind) as processes, AsyncExitStack() as place:
        await place.enter_async_context(processes)
        try:
            process = await anyio.open_process(
                [*_UPLOAD_PACK, *options, path],
                env={**git_environment(), "GIT_PROTOCOL": protocol if protocol in _PROTOCOLS else ""},
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise not_supported("git is not installed on the Hub's machine") from None
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(ProcessLookupError):
                for limit, value in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
                    resource.prlimit(process.pid, limit, (value, value))
                os.setpriority(os.PRIO_PROCESS, process.pid, 19)  # below the server's own
            with suppress(anyio.BrokenResourceError):
                await process.stdin.send(body)  # git reads the whole request before it responds
                await process.stdin.aclose()
            began = anyio.current_time()
            async for block in process.stdout:
                yield block
                if anyio.current_time() - began > SHARED_SECONDS and has_too_many(request, kind):
                    await place.aclose()  # at once, so that no other clone ends for the same waiting request
                    raise TimeoutError
        finally:
            with suppress(ProcessLookupError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.aclose()
