"""Import of kernels and organizations from another Hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd

from kernel_format.errors import HubError, VerificationError
from tests.support.alternating_proxy import alternating_proxy
from tests.support.builder_process import run_builder
from tests.support.loopback import QuietHandler, served
from tests.support.programs import wait_for
from tests.support.running_hub import TOKEN, RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, commit, publish_kernel, write_kernel


def copy(inside: RunningHub, outside: RunningHub, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["hub", "import", source, "--from", outside.url, "--endpoint", inside.url, *options]
    return run_builder(inside.environment, *command)


def downloads(hub: RunningHub) -> int:
    """Return how many files the Hub has sent."""
    lines = [json.loads(line) for line in hub.log.read_text().splitlines()]
    return sum(line.get("method") == "GET" and "/resolve/" in line.get("path", "") for line in lines)


@pytest.fixture
def pair(start_hub: Callable[..., RunningHub], tmp_path: Path) -> tuple[RunningHub, RunningHub]:
    """An empty Hub, and a Hub with a kernel."""
    inside, outside = start_hub(root=tmp_path / "inside"), start_hub(root=tmp_path / "outside")
    publish_kernel(outside, write_kernel(tmp_path / "one"))
    return inside, outside


class Limited(QuietHandler):
    """Asks to send each request again."""

    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send(429, Retry_After="0")

    do_GET = do_HEAD = do_POST = do_PUT = refuse


def test_limited_requests_are_sent_again(pair: tuple[RunningHub, RunningHub]) -> None:
    inside, outside = pair
    with (
        served(Limited) as limit,
        alternating_proxy([limit, outside.url], by_path=True) as origin,
        alternating_proxy([limit, inside.url], by_path=True) as endpoint,
    ):
        command = ["hub", "import", KERNEL, "--from", origin, "--endpoint", endpoint]
        done = run_builder(inside.environment, *command)
    assert done.returncode == 0 and f"{KERNEL}: v1; 3 distinct files" in done.stdout, done.stderr
    assert "cannot list its branches: the Hub limits the requests (status 429); repeated in 0 s" in done.stderr


def test_an_import_from_a_hub_transfers_changes_only(pair: tuple[RunningHub, RunningHub], tmp_path: Path) -> None:
    inside, outside = pair
    large = copy(inside, outside, KERNEL, "--max-size", "0")
    assert large.returncode == VerificationError.exit_code and "--max-size 1 permits" in large.stderr
    none = copy(inside, outside, "none")
    assert none.returncode == HubError.exit_code and "none has no public kernels" in none.stderr
    renamed = json.loads(copy(inside, outside, KERNEL, "--organization", "ours", "--json").stdout)
    assert renamed["repositories"][0]["repo_id"] == "ours/twice"
    first = copy(inside, outside, KERNEL)
    assert first.returncode == 0 and f"{KERNEL}: v1; 3 distinct files" in first.stdout, first.stderr
    commits = len(inside.api().list_repo_commits(KERNEL, repo_type="kernel", revision="v1"))
    sent = downloads(outside)
    again = copy(inside, outside, KERNEL)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert downloads(outside) == sent
    result = json.loads(copy(inside, outside, "kernels-community", "--json").stdout)
    assert [item["updated"] for item in result["repositories"]] == [[]]
    assert len(inside.api().list_repo_commits(KERNEL, repo_type="kernel", revision="v1")) == commits

    change = [CommitOperationAdd("README.md", b"new"), CommitOperationAdd("x.py", b"x")]
    outside.api().create_commit(KERNEL, change, commit_message="m", repo_type="kernel")
    publish_kernel(outside, write_kernel(tmp_path / "two", version=2, factor=3), branch="v2")
    result = json.loads(copy(inside, outside, KERNEL, "--json").stdout)["repositories"][0]
    assert result["updated"] == ["main", "v2"] and downloads(outside) == sent + 2 + 5
    assert inside.api().list_repo_files(KERNEL, repo_type="kernel") == ["README.md", "x.py"]
    # A package is verified as a whole, and nothing of a wrong one is published. Other kernels are copied.
    changed = b"def twice(x):\n    return x * 3\n"
    commit(outside.api(), KERNEL, f"build/{VARIANT}/__init__.py", changed, revision="v1")
    publish_kernel(outside, write_kernel(tmp_path / "three"), repo_id="kernels-community/zwei")
    head = inside.api().repo_info(KERNEL, repo_type="kernel", revision="v1").sha
    wrong = copy(inside, outside, "kernels-community")
    assert wrong.returncode == VerificationError.exit_code and "do not match the metadata" in wrong.stderr
    assert "kernels-community/zwei: v1" in wrong.stdout
    assert inside.api().repo_info(KERNEL, repo_type="kernel", revision="v1").sha == head
    # Own files, of an import that was changed and of another kernel, are kept.
    commit(inside.api(), "kernels-community/zwei", "own.py", revision="v1")
    publish_kernel(inside, write_kernel(tmp_path / "own", factor=5), repo_id="own/zwei", branch="main")
    for organization in ("kernels-community", "own"):
        heads = inside.api().list_repo_refs(f"{organization}/zwei", repo_type="kernel").branches
        refused = copy(inside, outside, "kernels-community/zwei", "--organization", organization)
        assert "the last commit is not an import of kernels-community/zwei" in refused.stderr, refused.stderr
        assert "choose another --organization" in refused.stderr and refused.returncode == HubError.exit_code
        assert inside.api().list_repo_refs(f"{organization}/zwei", repo_type="kernel").branches == heads
    outside.kill()
    assert copy(inside, outside, KERNEL).returncode == HubError.exit_code


@pytest.mark.attack
def test_a_private_kernel_is_not_copied(pair: tuple[RunningHub, RunningHub], tmp_path: Path) -> None:
    inside, outside = pair
    publish_kernel(outside, write_kernel(tmp_path / "two"), repo_id="org/two", private=True)
    with alternating_proxy([outside.url], more_headers=TOKEN) as origin:  # which signs its users on
        done = run_builder(inside.environment, "hub", "import", "org/two", "--from", origin, "--endpoint", inside.url)
    assert done.returncode == HubError.exit_code and "it is private" in done.stderr, done.stderr
    assert not inside.api().repo_exists("org/two", repo_type="kernel")


def test_an_import_may_be_killed_and_run_twice_at_once(pair: tuple[RunningHub, RunningHub], tmp_path: Path) -> None:
    inside, outside = pair
    for number in range(3):
        publish_kernel(outside, write_kernel(tmp_path / f"{number}"), repo_id=f"kernels-community/k{number}")
    places = ["--from", outside.url, "--endpoint", inside.url]
    command = [sys.executable, "-m", "kernel_builder", "hub", "import", "kernels-community", *places]
    for request in ("/preupload/", "/commit/"):  # the kill is in the middle of a branch, or after the first
        before = inside.log.read_text().count(request)
        with subprocess.Popen(command, env=inside.environment, stderr=subprocess.DEVNULL) as process:
            assert wait_for(lambda old=before, request=request: inside.log.read_text().count(request) > old, 60)
            process.kill()
    both = [subprocess.Popen(command, env=inside.environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert copy(inside, outside, "kernels-community").stdout == ""
    for repo_id in (KERNEL, *(f"kernels-community/k{number}" for number in range(3))):
        files = [hub.api().list_repo_files(repo_id, repo_type="kernel", revision="v1") for hub in pair]
        assert files[0] == files[1]
        assert len(inside.api().list_repo_commits(repo_id, repo_type="kernel", revision="v1")) == 2
