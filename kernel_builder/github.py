"""Finds the commit that `.github/workflows/build-kernels.yml` compares the projects with.

    python -m kernel_builder.github

It prints the commit, or an empty line if all projects are to be built. It reads the variables that GitHub provides to
every job, and $GITHUB_TOKEN.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import requests

from kernel_builder.checkouts import git_output
from kernel_format.errors import HubError

_TIMEOUT_SECONDS = 30


def base() -> str:
    """Return the commit to compare the projects with, or an empty text if all projects are to be built.

    For a pull request this is the first parent of the merge that GitHub checks out. For a push it is the commit of the
    last successful run of the same workflow on the branch, so that the projects of a failed run are built again.
    """
    event = os.environ["GITHUB_EVENT_NAME"]
    if event == "pull_request":
        return "HEAD^1"
    if event != "push":
        return ""
    workflow = os.environ["GITHUB_WORKFLOW_REF"].partition("@")[0].rpartition("/")[2]
    commit = _last_success(workflow, os.environ["GITHUB_REF_NAME"])
    if not commit:
        return ""
    # After a forced push that removed the commit, its packages may be on no branch.
    known = git_output(Path.cwd(), "merge-base", "--is-ancestor", commit, "HEAD")
    return "" if known is None else commit


def _last_success(workflow: str, branch: str) -> str | None:
    """Return the commit of the last push to a branch for which a workflow succeeded, or None."""
    repository = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}"
    address = f"{repository}/actions/workflows/{workflow}/runs"
    headers = {"Accept": "application/vnd.github+json", "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}"}
    query = {"branch": branch, "event": "push", "status": "success", "per_page": "1"}
    try:
        answer = requests.get(address, params=query, headers=headers, timeout=_TIMEOUT_SECONDS)
        answer.raise_for_status()
        runs = answer.json()["workflow_runs"]
    except requests.RequestException as error:
        raise HubError(
            f"the request to GitHub failed: {error}", where=address, hint="the job needs `actions: read` to read runs"
        ) from error
    return str(runs[0]["head_sha"]) if runs else None


if __name__ == "__main__":
    try:
        print(base())
    except HubError as error:
        print(f"error: {error}\n  hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
