"""Judging on the nodes of a Ray cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from searches import QUICK_JUDGE, ROOT, logged, quick_request, quoted, run_search

from kernel_format.errors import ToolchainError

pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of two nodes on this machine, each with a cache of its own as two machines have; yields its address.

    The nodes' verdicts are counted in one file.
    """
    from ray.cluster_utils import Cluster

    directory = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("QUICK_JUDGE_CALLS", str(directory / "calls"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        first, second = ({"KERNEL_BUILDER_CACHE": str(directory / "caches" / name)} for name in ("first", "second"))
        nodes = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, "env_vars": first})
        nodes.add_node(num_cpus=1, env_vars=second)
        nodes.wait_for_nodes()
        try:
            yield nodes.address
        finally:
            nodes.shutdown()


def test_both_nodes_judge(tmp_path: Path, cluster: str) -> None:
    agents = [quoted("# right 2.5"), quoted("# wrong"), quoted("# right 1.5")]
    judge = (*QUICK_JUDGE, "--both-nodes")
    result = run_search(quick_request(tmp_path, *agents, attempts=6, jobs=6, ray=cluster, judge=judge))
    assert result.best and result.best["attempt"] in (1, 4)
    verdicts = [event["judged"]["verdict"] for event in logged(result.run, "try-ended")]
    assert len(verdicts) == 6
    assert {verdict["device"] for verdict in verdicts} == {"first", "second"}


@pytest.mark.attack
def test_an_agent_asks_the_cluster(tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `./judge` nor a node imports modules of the directory that it starts in."""
    evil = "mkdir kernel_judge && echo raise SystemExit > kernel_judge/__init__.py"
    monkeypatch.chdir(tmp_path)
    subprocess.run(["sh", "-c", evil], check=True)
    asking = f"sh -c 'echo \"# right 2\" > candidate.py; {evil}; ./judge'"
    result = run_search(quick_request(tmp_path, asking, ray=cluster))
    assert result.best
    assert "The candidate is right." in (result.run / "attempts/0001/1/agent.log").read_text()


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        run_search(request := quick_request(tmp_path, quoted("# wrong"), ray="127.0.0.1:1"))
    assert not logged(request.run, "started")
