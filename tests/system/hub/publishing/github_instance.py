"""The part of GitHub's REST API that the workflows use, on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import QuietHandler, served

TOKEN = "token-of-the-job"


@dataclass
class RunningGitHub:
    """A repository: the commits of successful runs by workflow and branch."""

    url: str = ""
    runs: dict[tuple[str, str], list[str]] = field(default_factory=dict)


@contextmanager
def running(repository: str) -> Iterator[RunningGitHub]:
    """Serve an empty repository in the context."""
    github = RunningGitHub()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query)
            prefix, _, rest = asked.path.partition("/actions/workflows/")
            workflow, _, runs = rest.partition("/")
            if self.headers["Authorization"] != f"Bearer {TOKEN}" or (prefix, runs) != (f"/repos/{repository}", "runs"):
                self.send_json(404, {"message": "Not Found"})
                return
            assert query["status"] == ["success"] and query["event"] == ["push"]
            commits = github.runs.get((workflow, query["branch"][0]), [])
            self.send_json(200, {"workflow_runs": [{"head_sha": commit} for commit in commits[-1:]]})

    with served(Handler) as github.url:
        yield github
