"""Upload and download of large files by the LFS batch API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from kernel_hub import names
from kernel_hub.git.objects import LargeFile, TreeEntry
from kernel_hub.http.receive import blocks
from kernel_hub.http.turns import in_turn, take_turn
from kernel_hub.refusals import bad_request
from kernel_hub.routes.parameters import Body, HubRoute, RepoId, TheCaller, TheHub
from kernel_hub.routes.responses import base_url, content_response

router = APIRouter(route_class=HubRoute)


class LargeObject(Body):
    """A large file that a client is going to upload or download."""

    oid: str
    size: Annotated[int, Field(ge=0)]


class Batch(Body):
    """The body of the LFS batch API."""

    operation: Literal["upload", "download"]
    objects: Annotated[list[LargeObject], Field(max_length=1000)]
    hash_algo: str = "sha256"


@router.post("/kernels/{organization}/{name}.git/info/lfs/objects/batch")
@in_turn
def large_file_batch(repo_id: RepoId, body: Batch, request: Request, hub: TheHub, caller: TheCaller) -> JSONResponse:
    """Return addresses for the upload or download of large files. Files that exist already are not uploaded again."""
    uploading = body.operation == "upload"
    request.state.reads = not uploading
    # Any caller with a token may open a pull request, whose large files come first.
    repository = hub.to_propose(repo_id, caller) if uploading else hub.to_read(repo_id, caller)
    if body.hash_algo != "sha256":
        raise bad_request(f"hash_algo {body.hash_algo!r} is not known; expected 'sha256'")
    limit = hub.settings.limits.file_bytes
    objects: list[dict[str, Any]] = []
    present: list[str] = []
    new = 0
    for wanted in body.objects:
        sha256 = names.sha256(wanted.oid)
        item: dict[str, Any] = {"oid": sha256, "size": wanted.size}
        here = sha256 in repository.owned and hub.large_files.size(sha256) == wanted.size
        if uploading and wanted.size > limit:
            item["error"] = {"code": 422, "message": f"{wanted.size} bytes; this Hub takes files up to {limit}"}
        elif not uploading and not here:
            item["error"] = {"code": 404, "message": f"{repo_id} has no large file {sha256}"}
        elif uploading and here:
            present.append(sha256)
        else:
            new += wanted.size if uploading else 0
            query = hub.sign(body.operation, repo_id, sha256, wanted.size, caller)
            href = f"{base_url(request)}/api/kernels/{repo_id}/large/{sha256}?{query}"
            item["actions"] = {body.operation: {"href": href, "header": {}}}
            item["authenticated"] = True
        objects.append(item)
    hub.allowances.check(new)
    if present:  # a commit follows: `kernel-hub gc` must not remove files that were uploaded long ago
        repository.owned.add(present)
    return JSONResponse(
        {"transfer": "basic", "objects": objects, "hash_algo": "sha256"}, media_type="application/vnd.git-lfs+json"
    )


class SignedQuery(Body):
    """The query of a signed address."""

    size: Annotated[int, Field(ge=0)]
    expires: int
    by: str = ""
    signature: str


SignedUrl = Annotated[SignedQuery, Query()]


@router.put(
    "/api/kernels/{organization}/{name}/large/{sha256}",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"format": "binary"}}}}},
)
async def receive_large_file(
    repo_id: RepoId, sha256: str, request: Request, hub: TheHub, signed: SignedUrl
) -> Response:
    """Receive a large file at a signed address."""
    caller = hub.check_signature("upload", repo_id, sha256, signed.size, signed.expires, signed.by, signed.signature)
    request.state.caller = caller.name
    repository = await take_turn(partial(hub.to_propose, repo_id, caller), "quick")
    await take_turn(partial(hub.allowances.check, signed.size), "quick")
    with hub.allowances.claim() as claim, hub.large_files.receive() as incoming:

        def write(block: bytes) -> None:
            claim(len(block))
            incoming.write(block)

        async for block in blocks(request):
            if incoming.size + len(block) > signed.size:
                announced = f"the announced {signed.size} bytes for {sha256}"
                raise bad_request(f"received more than {announced}; nothing was stored")
            await take_turn(partial(write, block), "quick")

        def keep() -> None:
            incoming.seal()
            incoming.check(sha256, signed.size)
            hub.to_propose(repo_id, hub.tokens.caller_by_key(signed.by))  # if it was not removed
            hub.keep(repository, [incoming])

        await take_turn(keep, "write")
    request.app.state.metrics.received.inc(signed.size)
    return Response(headers={"ETag": f'"{sha256}"'})


@router.get("/api/kernels/{organization}/{name}/large/{sha256}")
def send_large_file(repo_id: RepoId, sha256: str, request: Request, hub: TheHub, signed: SignedUrl) -> Response:
    """Send a large file from a signed address."""
    caller = hub.check_signature("download", repo_id, sha256, signed.size, signed.expires, signed.by, signed.signature)
    request.state.caller, request.state.key = caller.name, caller.key
    repository = hub.to_read(repo_id, caller)
    large = LargeFile(sha256, signed.size)
    return content_response(request, hub, repository, TreeEntry(sha256, sha256, False, 0, large), "")
