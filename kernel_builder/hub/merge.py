"""Merging a pull request of a kernel, which the public client does not support for this type of repository."""

from __future__ import annotations

import requests

from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_format.errors import HubError


def merge_pull_request(repo_id: str, number: int, *, endpoint: str | None = None) -> str:
    """Merge a pull request, and return the commit that its branch then points to.

    Args:
        repo_id: The repository.
        number: The number of the pull request, as in `refs/pr/1`.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.

    Raises:
        HubError: If there is no such pull request, it cannot be merged, or the token may not merge it.
    """
    from huggingface_hub import get_token

    repository = RemoteRepository(repo_id, endpoint=endpoint)
    repository.require_write()
    url = f"{repository.api.endpoint}/api/kernels/{repo_id}/discussions/{number}/merge"
    where = f"{repo_id} on {repository.api.endpoint}"
    try:
        answer = requests.post(url, headers={"Authorization": f"Bearer {get_token()}"}, json={}, timeout=60)
        if answer.status_code != 200:
            message = answer.headers.get("X-Error-Message") or answer.text[:200]
            raise HubError(f"cannot merge pull request {number}: {message} (status {answer.status_code})", where=where)
        return str(answer.json()["commitOid"])
    except (requests.RequestException, KeyError, TypeError) as error:
        raise HubError(
            f"cannot merge pull request {number}: {error}",
            where=where,
            hint="check $HF_ENDPOINT; only Hubs of `kernel-builder hub serve` can merge",
        ) from error
