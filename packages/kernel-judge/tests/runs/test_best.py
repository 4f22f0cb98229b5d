"""The result of a search: verified again, written as a project, published; and the agents' inputs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from agents import BODIES, MODEL
from searches import agent, logged, quick_request, quoted, run_search

from kernel_format.errors import ConfigError
from kernel_judge.search.search_request import parse_context
from kernel_judge.search.workspace import PROJECT, Workspace
from tests.support.builder_process import run_builder
from tests.support.places import SOURCES
from tests.support.running_hub import running_hub
from tests.support.torch_process import output_with_torch

pytestmark = pytest.mark.usefixtures("judge_calls")


def test_the_best_is_published_by_build_and_upload(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = MODEL.format(body=BODIES["good"])
    best = run_search(quick_request(tmp_path, quoted(f"# right 2.5\n{model}"))).run / "best"
    with running_hub(tmp_path_factory.mktemp("hub"), "--trust", "kernels-community") as hub:
        options = ["--backend", "cpu", "--repo-id", "kernels-community/hard-swish", "--json"]
        run_builder(hub.environment, "build-and-upload", best, *options, check=True)
        output_with_torch(SOURCES["load_hard_swish"], **hub.environment)
        card = hub.api().hf_hub_download(
            "kernels-community/hard-swish", "README.md", repo_type="kernel", local_dir=tmp_path / "card"
        )
    text = Path(card).read_text()
    assert "right, twice" in text and "- 2.50 (2.45 to 2.55) times the speed of eager" in text
    assert str(tmp_path) not in text


def test_a_verdict_that_does_not_hold_makes_room_for_the_next(tmp_path: Path) -> None:
    result = run_search(quick_request(tmp_path, quoted("# right 3.0 lucky"), quoted("# right 2.0")))
    assert [event["attempt"] for event in logged(result.run, "verified")] == [1, 2]
    assert result.best and (result.best["attempt"], result.best["speed"]) == (2, 2.0)


@pytest.mark.attack
def test_a_directory_in_the_place_of_the_card_is_replaced(tmp_path: Path) -> None:
    request = quick_request(tmp_path, quoted("# right 2.0"))
    best = run_search(request).run / "best"
    frozen = Workspace(request.run, 1, 1).frozen_candidate()
    assert frozen
    project = shutil.copytree(best, frozen.with_name(PROJECT))
    frozen.unlink()
    (project / "CARD.md").unlink()
    (project / "CARD.md/inner").mkdir(parents=True)
    run_search(request)
    assert "right, twice" in (best / "CARD.md").read_text()


def test_agents_get_the_contexts_in_turn(tmp_path: Path) -> None:
    reference = tmp_path / "kernel.cu"
    reference.write_text("__global__ void hard_swish();")
    contexts = (parse_context("none"), parse_context("skill,reference"))
    request = quick_request(tmp_path, quoted("# wrong"), attempts=3, contexts=contexts, references=(reference,))
    run = run_search(request).run
    spaces = [Workspace(run, number, 1).directory for number in range(1, 4)]
    given = [sorted(path.name for path in space.glob("context/*")) for space in spaces]
    assert given == [[], ["reference", "skill"], []]
    assert (spaces[1] / "context/skill/SKILL.md").is_file() and (spaces[1] / "context/reference/kernel.cu").is_file()
    assert "`context/skill/`" in (spaces[1] / "PROMPT.md").read_text()


def test_a_context_without_its_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file is named"):
        run_search(quick_request(tmp_path, agent("crashing"), contexts=(("reference",),)))
    with pytest.raises(ConfigError, match="'tutorial' is not a context"):
        parse_context("skill,tutorial")


@pytest.mark.attack
@pytest.mark.parametrize("named", ["link.cu", "directory"])
def test_no_link_of_a_reference_is_followed(named: str, tmp_path: Path) -> None:
    """A link in a cloned repository could lead to a private file, which agents then send away."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "private").write_text("token")
    for link in ("link.cu", "directory/inner.cu"):
        (tmp_path / link).symlink_to(tmp_path / "private")
    request = quick_request(tmp_path, "true", contexts=(("reference",),), references=(tmp_path / named,))
    with pytest.raises(ConfigError, match=r"\.cu: is a symbolic link"):
        run_search(request)
    assert not [path for path in request.run.rglob("*") if path.is_file() and "token" in path.read_text()]


def test_an_agent_asks_the_judge(tmp_path: Path) -> None:
    asking = "sh -c './judge; echo \"# wrong\" > candidate.py; ./judge; echo status $?'"
    run = run_search(quick_request(tmp_path, asking)).run
    log = Workspace(run, 1, 1).log.read_text()
    assert "There is no candidate" in log
    assert "The candidate is wrong.\nwrong-result: it is wrong on purpose" in log
    assert "status 1" in log


def test_a_command_that_answers_with_text_is_an_agent(tmp_path: Path) -> None:
    answer = tmp_path / "answer.md"
    answer.write_text("Use this:\n\n```python\n# wrong\n```\n\nNo, better:\n\n```python\n# right 2\n```\n")
    script = Path(__file__).parents[4] / "examples/search/answer_agent.py"
    result = run_search(quick_request(tmp_path, f"{sys.executable} {script} sh -c 'tail -n 3; cat {answer}'"))
    assert result.best and result.best["speed"] == 2.0
    assert "Answer with the complete `candidate.py`" in Workspace(result.run, 1, 1).log.read_text()


def test_the_command_prints_the_result(tmp_path: Path) -> None:
    task = quick_request(tmp_path, "true").task
    done = run_builder(os.environ, "search", task, "--agent", "true", "--run", tmp_path / "run")
    assert done.returncode == 1
    assert "No candidate is right and faster than the reference." in done.stdout
    assert "attempt 1, try 1: no-candidate" in done.stderr
