"""The workflows' requests to GitHub's REST API."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from kernel_format.errors import HubError

_TIMEOUT_SECONDS = 30
# The author of the comments that a workflow writes with its own token.
_AUTHOR = "github-actions[bot]"
_MARKER = "<!-- kernel-builder: packages -->"
_PAGE = 100


@dataclass(frozen=True)
class GitHub:
    """One repository on GitHub, with a token."""

    address: str
    repository: str
    token: str

    @classmethod
    def of_this_job(cls) -> GitHub:
        """Return the current job's repository, with the job's token."""
        return cls(os.environ["GITHUB_API_URL"], os.environ["GITHUB_REPOSITORY"], os.environ["GITHUB_TOKEN"])

    def last_success(self, workflow: str, branch: str) -> str | None:
        """Return the commit of the last push to a branch for which a workflow succeeded, or None."""
        query = {"branch": branch, "event": "push", "status": "success", "per_page": "1"}
        runs = self._request("GET", f"actions/workflows/{workflow}/runs", params=query)["workflow_runs"]
        return str(runs[0]["head_sha"]) if runs else None

    def pull_request(self, owner: str, branch: str, commit: str) -> int | None:
        """Return the number of the open pull request that has `commit` of a branch of a fork as its head, or None.

        GitHub does not name a fork's pull request in the event of a workflow run.
        """
        query = {"head": f"{owner}:{branch}", "state": "open", "per_page": str(_PAGE)}
        numbers = [
            pull["number"] for pull in self._request("GET", "pulls", params=query) if pull["head"]["sha"] == commit
        ]
        return int(numbers[0]) if numbers else None

    def comment(self, number: int, text: str) -> str:
        """Write the comment under a pull request, or replace the earlier one, and return its address."""
        body = {"body": f"{_MARKER}\n{text}"}
        earlier = self._earlier_comment(number)
        if earlier is None:
            return str(self._request("POST", f"issues/{number}/comments", json=body)["html_url"])
        return str(self._request("PATCH", f"issues/comments/{earlier}", json=body)["html_url"])

    def _earlier_comment(self, number: int) -> int | None:
        page = 1
        while True:
            query = {"per_page": str(_PAGE), "page": str(page)}
            comments = self._request("GET", f"issues/{number}/comments", params=query)
            for comment in comments:
                # Any user can write the marker; only the workflow's own comment is replaced.
                if (comment["user"] or {}).get("login") == _AUTHOR and comment["body"].startswith(_MARKER):
                    return int(comment["id"])
            if len(comments) < _PAGE:
                return None
            page += 1

    def _request(self, method: str, path: str, **options: Any) -> Any:
        headers = {"Accept": "application/vnd.github+json", "Authorization": f"Bearer {self.token}"}
        address = f"{self.address}/repos/{self.repository}/{path}"
        with requests.Session() as session:
            session.mount(
                self.address, HTTPAdapter(max_retries=Retry(3, backoff_factor=1, status_forcelist=[502, 503]))
            )
            try:
                answer = session.request(method, address, headers=headers, timeout=_TIMEOUT_SECONDS, **options)
                answer.raise_for_status()
                return answer.json()
            except requests.RequestException as error:
                raise HubError(
                    f"the request to GitHub failed: {error}",
                    where=f"{method} {address}",
                    hint="the job needs `actions: read` to read runs, and `pull-requests: write` to comment",
                ) from error
