"""Merging a pull request of a kernel: the one thing that the public client does not do for this type of repository."""

from __future__ import annotations

import requests

from kernel_builder.errors import HubError
from kernel_builder.hub.remote_repository import Repository


def merge_pull_request(repo_id: str, number: int, *, endpoint: str | None = None) -> str:
    """Merge a pull request, and return the commit that its branch is at then.

    Args:
        repo_id: The repository.
        number: The pull request, as in `refs/pr/1`.
        endpoint: The Hub; by default as the Hub's own tools find it.

    Raises:
        HubError: There is no such request, it cannot be merged, or the token may not.
    """
    from huggingface_hub import get_token

    repository = Repository(repo_id, endpoint=endpoint)
    repository.require_write()
    url = f"{repository.api.endpoint}/api/kernels/{repo_id}/discussions/{number}/merge"
    where = f"{repo_id} on {repository.api.endpoint}"
    try:
        answer = requests.post(url, headers={"Authorization": f"Bearer {get_token()}"}, json={}, timeout=60)
        if answer.status_code != 200:
            said = answer.headers.get("X-Error-Message") or answer.text[:200]
            raise HubError(f"cannot merge pull request {number}: {said} (status {answer.status_code})", where=where)
        return str(answer.json()["commitOid"])
    except (requests.RequestException, KeyError, TypeError) as error:
        raise HubError(
            f"cannot merge pull request {number}: {error}",
            where=where,
            hint="is this a Hub of `kernel-builder hub serve`? check $HF_ENDPOINT",
        ) from error
