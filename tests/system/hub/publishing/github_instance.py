"""The part of GitHub's REST API that the workflows use, on a loopback port."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.support.loopback import QuietHandler, served

TOKEN = "token-of-the-job"


@dataclass
class RunningGitHub:
    """A repository: successful runs by workflow and branch, pull requests by head, comments by pull request."""

    url: str = ""
    runs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    pulls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    comments: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        """Return the answer to a request, or None if GitHub has no such address."""
        if method == "GET" and (match := re.fullmatch(r"actions/workflows/([^/]+)/runs", path)):
            assert query["status"] == "success" and query["event"] == "push"
            commits = self.runs.get((match[1], query["branch"]), [])
            return {"workflow_runs": [{"head_sha": commit} for commit in reversed(commits)][: int(query["per_page"])]}
        if method == "GET" and path == "pulls":
            return self.pulls.get(query["head"], []) if query["state"] == "open" else []
        if match := re.fullmatch(r"issues/(\d+)/comments", path):
            there = self.comments.setdefault(int(match[1]), [])
            if method == "POST":
                there.append(self.comment(body["body"], "github-actions[bot]"))
                return there[-1]
            first = (int(query["page"]) - 1) * int(query["per_page"])
            return there[first : first + int(query["per_page"])]
        if method == "PATCH" and (match := re.fullmatch(r"issues/comments/(\d+)", path)):
            (comment,) = (posted for each in self.comments.values() for posted in each if posted["id"] == int(match[1]))
            comment["body"] = body["body"]
            return comment
        return None

    def comment(self, body: str, author: str) -> dict[str, Any]:
        """Return a new comment, as GitHub describes it."""
        number = sum(map(len, self.comments.values())) + 1
        return {"id": number, "body": body, "user": {"login": author}, "html_url": f"{self.url}/comment/{number}"}


@contextmanager
def running(repository: str) -> Iterator[RunningGitHub]:
    """Serve an empty repository in the context."""
    github = RunningGitHub()

    class Handler(QuietHandler):
        def _serve(self) -> None:
            asked = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            path, answer = asked.path.removeprefix(f"/repos/{repository}/"), None
            if self.headers["Authorization"] == f"Bearer {TOKEN}":
                answer = github.answer(self.command, path, dict(parse_qsl(asked.query)), body)
            if answer is None:
                self.send_json(404, {"message": "Not Found"})
            else:
                self.send_json(200, answer)

        do_GET = do_POST = do_PATCH = _serve

    with served(Handler) as github.url:
        yield github
