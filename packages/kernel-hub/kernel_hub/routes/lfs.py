"""Upload and download of large files by the LFS batch API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from kernel_hub import names
from kernel_hub.git.objects import LargeFile, TreeEntry
from kernel_hub.http.receive import Slots, blocks
from kernel_hub.refusals import bad_request
from kernel_hub.routes.content import content_response
from kernel_hub.routes.parameters import (
    Body,
    RepoId,
    TheCaller,
    TheHub,
    TheTurns,
    base_url,
    checked_repo_id,
    kernels_only,
    next_page,
    timestamp,
)

router = APIRouter()

LARGE_FILES_PAGE = 1000


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
    hub.allowances.check(repo_id, new)
    if present:  # a commit follows: `hub gc` must not take what was uploaded long ago for abandoned
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
    repo_id: RepoId,
    sha256: str,
    request: Request,
    hub: TheHub,
    turns: TheTurns,
    signed: SignedUrl,
) -> Response:
    """Receive a large file at a signed address."""
    caller = hub.check_signature("upload", repo_id, sha256, signed.size, signed.expires, signed.by, signed.signature)
    request.state.caller = caller.name
    slots: Slots = request.app.state.upload_slots
    with slots.hold(caller.name):
        repository = await to_thread.run_sync(hub.to_propose, repo_id, caller)
        with hub.allowances.claim(repo_id, signed.size), hub.large_files.receive(sha256, signed.size) as incoming:
            async for block in blocks(request):
                await to_thread.run_sync(incoming.write, block)
            await to_thread.run_sync(incoming.seal)
            await turns.retry(lambda: hub.keep(repository, [incoming]))
    request.app.state.metrics.received(signed.size)
    return Response(headers={"ETag": f'"{sha256}"'})


@router.get("/api/kernels/{organization}/{name}/large/{sha256}")
def send_large_file(
    repo_id: RepoId,
    sha256: str,
    request: Request,
    hub: TheHub,
    signed: SignedUrl,
) -> Response:
    """Send a large file from a signed address."""
    caller = hub.check_signature("download", repo_id, sha256, signed.size, signed.expires, signed.by, signed.signature)
    request.state.caller = caller.name
    repository = hub.to_read(repo_id, caller)
    large = LargeFile(sha256, signed.size)
    return content_response(request, hub, repository, TreeEntry(sha256, sha256, False, 0, large), "")


@router.get("/api/kernels/{organization}/{name}/lfs-files")
def list_large_files(
    repo_id: RepoId, request: Request, response: Response, hub: TheHub, caller: TheCaller, cursor: str = ""
) -> list[dict[str, Any]]:
    """List the large files that were uploaded to a repository, for those who may write to it.

    The list is as costly as the history is long. A file that no commit has is listed with an empty name.
    """
    repository = hub.to_read(repo_id, caller)
    caller.must_write(repo_id)
    places = {place.large.sha256: place for place in repository.owned.located()}
    listed = sorted(path for path in repository.owned.markers.iterdir() if path.name > cursor)
    if len(listed) > LARGE_FILES_PAGE:
        next_page(request, response, cursor=listed[LARGE_FILES_PAGE - 1].name)
    answer = []
    for marker in listed[:LARGE_FILES_PAGE]:
        place = places.get(marker.name)
        answer.append(
            {
                "fileOid": marker.name,
                "oid": marker.name,
                "filename": place.path if place else "",
                "ref": place.ref if place else None,
                "size": hub.large_files.size(marker.name) or 0,
                "pushedAt": timestamp(int(marker.stat().st_mtime)),
            }
        )
    return answer


class Deletions(Body):
    """The large files to delete permanently, by their SHA-256."""

    sha: Annotated[list[str], Field(max_length=1000)]
    rewrite_history: Annotated[bool, Field(alias="rewriteHistory")] = True


class LargeFileChanges(Body):
    """The body of `permanently_delete_lfs_files`."""

    deletions: Deletions


@router.post("/api/kernels/{organization}/{name}/lfs-files/batch")
async def delete_large_files(
    repo_id: RepoId, body: LargeFileChanges, hub: TheHub, caller: TheCaller, turns: TheTurns
) -> dict[str, bool]:
    """Delete large files permanently, and if asked for, from every commit that has them.

    Nobody can read them in this repository afterwards. `hub gc` frees their space, if no other repository has them.
    """
    wanted = [names.sha256(sha256) for sha256 in body.deletions.sha]

    def write() -> None:
        repository = hub.to_write(repo_id, caller)
        known = repository.owned.removed()
        if missing := [sha256 for sha256 in wanted if sha256 not in repository.owned and sha256 not in known]:
            raise bad_request(f"{repo_id} has no large file {missing[0]}; list_lfs_files lists those that it has")
        repository.delete_large_files(wanted, rewrite_history=body.deletions.rewrite_history)
        hub.index.refresh(repo_id, afresh=True)

    await turns.change(repo_id, write)
    return {"success": True}


class DuplicateFile(Body):
    """A large file to share with another repository."""

    sha256: str


class DuplicateTarget(Body):
    """The repository to share with."""

    type: str
    name: str


class Duplicate(Body):
    """The body of a request to share large files with another repository."""

    target: DuplicateTarget
    files: Annotated[list[DuplicateFile], Field(max_length=1000)]


@router.post("/api/kernels/{organization}/{name}/lfs-files/duplicate")
async def duplicate_large_files(
    repo_id: RepoId, body: Duplicate, hub: TheHub, caller: TheCaller, turns: TheTurns
) -> dict[str, Any]:
    """Let another repository own large files of this one, without an upload."""
    kernels_only(body.target.type)

    def share() -> list[str]:
        source = hub.to_read(repo_id, caller)
        target = hub.to_write(checked_repo_id(body.target.name), caller)
        known = [file.sha256 for file in body.files if file.sha256 in source.owned]
        added = sum(hub.large_files.size(sha256) or 0 for sha256 in set(known) if sha256 not in target.owned)
        hub.allowances.check(target.repo_id, added)
        with hub.store_lock.storing():
            target.owned.add(known)
        hub.index.grow(target.repo_id, added)
        return known

    known = await turns.retry(share)
    failed = [
        {"sha256": file.sha256, "error": f"{repo_id} has no such large file"}
        for file in body.files
        if file.sha256 not in known
    ]
    return {"success": not failed, "failed": failed}
