"""Uploads by Xet, the protocol of newer clients for large files.

`huggingface_hub` 2 uploads large files only by Xet if `hf_xet` is installed. The Hub assembles each file as soon as a
shard describes it, checks its SHA-256, and stores it like any other large file. Downloads do not use Xet.

For three weeks, clients remember which chunks they sent to which address, and do not send them again. So xorbs are
kept for four weeks after their last use. Each organisation has its own address and its own xorbs: a shard cannot refer
to chunks of another organisation, and a new Hub on the same port has other addresses. A token that may write only to
single repositories has, for each of them, an address and xorbs apart from those of the organisation. So have those who
may only open pull requests there, all of them together.
"""

from __future__ import annotations

import base64
import hmac
import json
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from kernel_hub import names
from kernel_hub.http.receive import Slots, blocks, parse_json, segment, while_connected
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import bad_request, too_large, wrong_token
from kernel_hub.routes.parameters import RepoId, TheCaller, TheHub, TheTurns, base_url, served_hub
from kernel_hub.storage.large_files import IncomingFile
from kernel_hub.tokens import Caller
from kernel_hub.xet.format import XetFile, Xorb, read_shard
from kernel_hub.xet.hashes import xorb_hash

router = APIRouter()

TOKEN_SECONDS = 3600
XORB_BYTES = 80 << 20
SHARD_BYTES = 64 << 20
OPEN_XORBS = 16
ASSEMBLING = 4  # shards at once, in threads that readers do not need
# What a shard may cost: chunks that are read, and headers of chunks in xorbs that are opened, often more than once.
STEPS = 1_000_000
BYTES_OF_STEP = 256  # one more for so many bytes of files


@dataclass(frozen=True)
class XetUpload:
    """The repository that an upload is for, and the folder of the xorbs that its shards may refer to."""

    repo_id: str
    folder: str

    def xorb_name(self, xorb: str) -> str:
        """Return the name of a xorb in the store."""
        names.sha256(xorb)
        return f"{self.folder}/{xorb[:2]}/{xorb}"

    def store(self, hub: Hub) -> str:
        """Return the part of the address that identifies this root and the folder."""
        return hub.signature(b"xet store\n" + self.folder.encode())[:16]


def _upload(repo_id: str, caller: Caller) -> XetUpload:
    organization = repo_id.partition("/")[0]
    if caller.may_write(repo_id):
        return XetUpload(repo_id, organization if caller.may_write(organization) else repo_id)
    return XetUpload(repo_id, f"{repo_id}/proposed")


def _sign(hub: Hub, payload: bytes) -> str:
    return hub.signature(b"xet\n" + payload)


def upload_of(request: Request) -> XetUpload:
    """Return what the request's write token is for.

    Raises:
        Refusal: If this Hub did not issue the token, it has expired, or its holder may no longer write.
    """
    hub = served_hub(request)
    payload, _, signature = request.headers.get("authorization", "").removeprefix("Bearer ").partition(".")
    try:
        decoded = base64.urlsafe_b64decode(payload)
        if not hmac.compare_digest(_sign(hub, decoded).encode(), signature.encode()):
            raise wrong_token()
        claims = parse_json(decoded)
    except ValueError:
        raise wrong_token() from None
    if claims["expires"] < time.time():
        raise wrong_token()
    repo_id = str(claims["repository"])
    request.state.repository = repo_id
    caller = hub.caller_by_key(claims["by"])  # the client's own token may have been removed
    request.state.caller = caller.name
    hub.to_propose(repo_id, caller)
    return _upload(repo_id, caller)


TheUpload = Annotated[XetUpload, Depends(upload_of)]


@router.get("/api/kernels/{organization}/{name}/xet-write-token/{revision:path}")
def write_token(
    repo_id: RepoId, revision: str, request: Request, hub: TheHub, caller: TheCaller, create_pr: bool = False
) -> JSONResponse:
    """Return the address for xorbs and shards, and a token for it."""
    hub.to_commit(repo_id, caller, segment(revision), create_pr=create_pr)
    expires = int(time.time()) + TOKEN_SECONDS
    payload = json.dumps({"repository": repo_id, "expires": expires, "by": caller.key}).encode()
    token = f"{base64.urlsafe_b64encode(payload).decode()}.{_sign(hub, payload)}"
    url = f"{base_url(request)}/xet/{_upload(repo_id, caller).store(hub)}"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


_BINARY: dict[str, Any] = {
    "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/xet/{store}/v1/xorbs/{prefix}/{xorb}", openapi_extra=_BINARY)
async def receive_xorb(prefix: str, xorb: str, upload: TheUpload, request: Request, hub: TheHub) -> dict[str, bool]:
    """Receive a xorb, and check that its name is the hash of its content: others' files are assembled from it."""
    name = upload.xorb_name(xorb)
    async with _received(request, hub, upload.repo_id, XORB_BYTES, "xorb") as path:
        await to_thread.run_sync(_keep_xorb, hub, name, path)
    return {"was_inserted": True}


@router.post("/xet/{store}/v1/shards", openapi_extra=_BINARY)
async def receive_shard(upload: TheUpload, request: Request, hub: TheHub, turns: TheTurns) -> dict[str, int]:
    """Receive a shard, assemble the files that it describes and store them."""
    async with _received(request, hub, upload.repo_id, SHARD_BYTES, "shard") as path:
        with ExitStack() as staged:
            limiter: CapacityLimiter = request.app.state.assembling
            made = await while_connected(request, partial(_assemble, hub, upload, path, staged), limiter)
            await turns.retry(lambda: hub.keep(hub.repositories.open(upload.repo_id), made))
    request.app.state.metrics.received(sum(file.size for file in made))
    return {"result": 1}


def _keep_xorb(hub: Hub, name: str, path: Path) -> None:
    claimed = name.rpartition("/")[2]
    with path.open("rb") as file:
        actual = xorb_hash(Xorb(claimed, file))
    if actual != claimed:
        raise bad_request(f"the xorb's content has the hash {actual}, not the announced {claimed}; nothing was stored")
    if hub.xorbs.size(name) is None:
        hub.index.grow_xorbs(name.partition("/")[0], path.stat().st_size)
    hub.xorbs.put(path, name)


@router.post("/v1/telemetry")
def telemetry() -> Response:
    """Accept the clients' telemetry and discard it."""
    return Response(status_code=204)


@asynccontextmanager
async def _received(request: Request, hub: Hub, repo_id: str, limit: int, what: str) -> AsyncIterator[Path]:
    """Write the body to a complete and synced staging file, which is deleted with the context unless it was moved."""
    slots: Slots = request.app.state.upload_slots
    path = hub.xorbs.new()
    with slots.hold(request.state.caller), hub.allowances.claim(repo_id) as claim:
        try:
            with path.open("xb") as file:
                received = 0
                async for block in blocks(request):
                    received += len(block)
                    if received > limit:
                        raise too_large(f"a {what} may have at most {limit} bytes")
                    claim.grow(len(block))
                    await to_thread.run_sync(file.write, block)
                file.flush()
                await to_thread.run_sync(os.fsync, file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)


class _Work:
    """What the assembly of a shard may still cost. It ends when nobody waits for it."""

    def __init__(self, wanted: Callable[[], bool], files_bytes: int) -> None:
        self._wanted = wanted
        self._left = STEPS + files_bytes // BYTES_OF_STEP

    def spend(self, steps: int) -> None:
        """Count steps before they are taken.

        Raises:
            Refusal: If they are too many, or the client has left.
        """
        self._left -= steps
        if self._left < 0:
            raise bad_request(
                "the shard's files are in too many parts of xorbs: set HF_HUB_DISABLE_XET=1 and try again"
            )
        if not self._wanted():
            raise bad_request("the connection was closed before the files were assembled; nothing was stored")


class _OpenXorbs:
    """The xorbs that an upload may refer to, by name. The most recently used ones stay open."""

    def __init__(self, hub: Hub, upload: XetUpload, work: _Work) -> None:
        self._blobs = hub.xorbs
        self._upload = upload
        self._work = work
        self._opened: OrderedDict[str, tuple[Xorb, ExitStack]] = OrderedDict()

    def __enter__(self) -> _OpenXorbs:
        return self

    def __exit__(self, *error: object) -> None:
        while self._opened:
            self._close_oldest()

    def __getitem__(self, name: str) -> Xorb:
        if name not in self._opened:
            if len(self._opened) == OPEN_XORBS:
                self._close_oldest()
            self._opened[name] = self._open(name)
        self._opened.move_to_end(name)
        return self._opened[name][0]

    def _open(self, name: str) -> tuple[Xorb, ExitStack]:
        key = self._upload.xorb_name(name)
        with ExitStack() as opened:
            try:
                self._blobs.used(key)
                file = opened.enter_context(self._blobs.on_this_machine(key))
            except FileNotFoundError:
                raise bad_request(
                    f"the xorb {name} is not on this Hub, but your client's cache says that it was uploaded: "
                    "delete the cache ($HF_HOME/xet), or set HF_HUB_DISABLE_XET=1"
                ) from None
            xorb = Xorb(name, file)
            self._work.spend(len(xorb))
            return xorb, opened.pop_all()

    def _close_oldest(self) -> None:
        _, (_, opened) = self._opened.popitem(last=False)
        opened.close()


def _assemble(
    hub: Hub, upload: XetUpload, path: Path, staged: ExitStack, wanted: Callable[[], bool]
) -> list[IncomingFile]:
    """Assemble the new files of a shard. They are deleted at the end of `staged`, unless they are kept until then.

    Args:
        wanted: Whether the client still waits for it.
    """
    repository = hub.repositories.open(upload.repo_id)
    limit = hub.settings.limits.file_bytes
    with ExitStack() as opened:
        shard = _mapped(path, opened)
        new: dict[str, XetFile] = {}
        present: list[str] = []
        for count, file in enumerate(read_shard(shard)):
            if count >= hub.settings.limits.commit_changes or not wanted():
                raise too_large(f"a shard describes at most {hub.settings.limits.commit_changes} files")
            if file.size > limit:
                raise too_large(f"{file.size} bytes; this Hub takes files up to {limit}")
            stored = hub.large_files.size(file.sha256) if file.sha256 in repository.owned else None
            if stored == file.size:
                present.append(file.sha256)
            else:
                new[file.sha256] = file
        if present:  # a commit follows: `hub gc` must not take what was uploaded long ago for abandoned
            repository.owned.add(present)
        # A small shard can describe any number of bytes, by ranges of chunks that repeat.
        size = sum(file.size for file in new.values())
        staged.enter_context(hub.allowances.claim(upload.repo_id, size))
        work = _Work(wanted, size)
        xorbs = opened.enter_context(_OpenXorbs(hub, upload, work))
        made: list[IncomingFile] = []
        for file in new.values():
            incoming = staged.enter_context(hub.large_files.receive(file.sha256, file.size))
            for part in file.chunk_ranges():
                for data in xorbs[part.xorb].read(part.start, part.end):
                    work.spend(1)
                    incoming.write(data)
            incoming.seal()
            made.append(incoming)
    return made


def _mapped(path: Path, opened: ExitStack) -> mmap.mmap:
    """Map a shard into memory. Its pages belong to the file cache, not to the process's heap."""
    file = opened.enter_context(path.open("rb"))
    try:
        return opened.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise bad_request("the shard is empty; expected at least a header") from None
