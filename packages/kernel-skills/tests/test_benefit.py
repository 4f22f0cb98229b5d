"""The benefit of a skill: the gain or loss of scripted agents, and its statistics."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import agents
import pytest
import quick_judge
from searches import TASK

from kernel_format.errors import ConfigError
from kernel_judge.search.limited_process import Limits
from kernel_judge.search.run_log import read_events
from kernel_judge.search.search_request import SearchRequest
from kernel_skills import intervals
from kernel_skills.benefit import Benefit, SkillTry, benefit_lines, compare_tries, find_tasks, measure_benefit
from kernel_skills.catalog import find_skill, read_skill
from kernel_skills.distillation import Distilled, distil
from tests.support.cli import expect
from tests.support.files import write_files
from tests.support.places import ROOT

STUDENTS = Path(__file__).with_name("students.py")


@pytest.fixture
def tasks(judge_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two tasks, a file and a directory, and other files."""
    monkeypatch.setenv("QUICK_JUDGE_CALLS", str(tmp_path / "calls"))
    files = {"silu.py": TASK, "silu/problem.py": TASK, "silu/task.toml": 'device = "cpu"', "README.md": "get_inputs"}
    return write_files(tmp_path / "tasks", files)


def request(run: Path, agent: str) -> SearchRequest:
    return SearchRequest(
        task=Path(),
        run=run,
        agents=(f"{sys.executable} {STUDENTS} {agent}",),
        jobs=2,
        limits=Limits(60, 2**32, 2**30),
        judge=(sys.executable, quick_judge.__file__),
    )


@pytest.fixture
def measured(tasks: Path, tmp_path: Path) -> Callable[[str], Benefit]:
    """Return a function that evaluates the skill with an agent."""

    def measure(agent: str, tries: int = 5) -> Benefit:
        skill = find_skill("cuda-kernels")
        return measure_benefit(skill, find_tasks(tasks), tries, request(tmp_path / agent, agent), print)

    return measure


@pytest.mark.parametrize(
    ("agent", "tries", "conclusion", "words", "shares"),
    [
        ("helped", 5, "helps", "The skill helps.", (0.5, 1.0)),
        ("same", 2, "no measurable help", "No measurable help", (0.5, 0.5)),
        ("harmed", 3, "harms", "The skill harms.", (1.0, 0.0)),
    ],
)
def test_agents_with_and_without_the_skill(
    measured: Callable[..., Benefit],
    agent: str,
    tries: int,
    conclusion: str,
    words: str,
    shares: tuple[float, float],
    tmp_path: Path,
) -> None:
    benefit = measured(agent, tries)
    assert benefit.conclusion == conclusion
    assert benefit_lines(benefit)[0].startswith(words)
    assert [sum(made.has_skill == has for made in benefit.tries) for has in (False, True)] == [2 * tries] * 2
    assert benefit.measures["pass@1"][:2] == pytest.approx(shares, abs=0.11)
    calls = (tmp_path / "calls").read_text()
    assert measured(agent, tries) == benefit, "the evaluation goes on where it was"
    assert (tmp_path / "calls").read_text() == calls


def test_an_evaluation_is_not_mixed_with_another(measured: Callable[..., Benefit], tmp_path: Path) -> None:
    write_files(tmp_path / "faster", {"skill.json": "{}"})
    with pytest.raises(ConfigError, match="evaluation of another skill"):
        measured("faster")


def test_a_directory_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text("print()\n")
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="has no task"):
            find_tasks(directory)
    assert find_tasks(tmp_path / "notes.py") == [tmp_path / "notes.py"]
    write_files(tmp_path, {"split/task.yml": "", "norm/workload.jsonl": "", "norm/definition.json": "", "notes.md": ""})
    assert find_tasks(tmp_path) == [tmp_path / "norm", tmp_path / "split"]


@pytest.mark.slow
def test_the_command_asks_the_judge(tasks: Path, tmp_path: Path) -> None:
    agent = f"{sys.executable} {agents.__file__} wrong"
    where = ["--tasks", str(tasks / "silu.py"), "--run", str(tmp_path / "run")]
    command = ["skills", "eval", "cuda-kernels", *where, "--agent", agent, "-k", "1", "-j", "2"]
    expect(1, "No measurable help", *command)
    reports = {
        event["judged"]["verdict"]["rejected-as"]
        for event in read_events(tmp_path / "run/silu/log.jsonl")[:-1]
        if "judged" in event
    }
    assert reports == {"wrong-result"}


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        (("eval", "cuda", "--tasks", "none", "--agent", "true"), "skills", "there is no skill 'cuda'"),
        (("eval", "docs", "--tasks", "none", "--agent", "true"), "docs/SKILL.md", "a directory with a SKILL.md"),
        (("distil", "docs", "--agent", "true", "-o", "/nonexistent/new"), "docs", "there is no log.jsonl"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], where: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = expect(2, f"error: {where}: ", "skills", *arguments)
    assert message in done.stderr and "hint: " in done.stderr


@pytest.fixture
def distilled(tasks: Path, tmp_path: Path) -> Callable[..., Distilled]:
    """Return a function that distils a skill from the evaluation of an agent that is right in every second try."""
    source = tmp_path / "same"
    measure_benefit(find_skill("cuda-kernels"), [tasks / "silu.py"], 2, request(source, "same"), print)

    def run(writer: str, student: str, tries: int = 5) -> Distilled:
        writer = f"{sys.executable} {STUDENTS} {writer}"
        evaluation = find_tasks(tasks), tries, request(tmp_path / student, student)
        return distil(source / "silu", tmp_path / "be-right", writer, *evaluation, print)

    return run


def test_a_distilled_skill_is_kept_only_if_it_helps(distilled: Callable[..., Distilled], tmp_path: Path) -> None:
    result = distilled("writer", "same", 2)
    assert result.kept is None and result.benefit.conclusion == "no measurable help"
    assert not (tmp_path / "be-right").exists()
    result = distilled("writer", "helped")
    assert result.kept == tmp_path / "be-right" and result.benefit.conclusion == "helps"
    assert read_skill(tmp_path / "be-right").description == "How to be right."
    assert [path.name for path in (tmp_path / "be-right").iterdir()] == ["SKILL.md"]
    with pytest.raises(ConfigError, match="exists"):
        distilled("writer", "helped")


def test_an_agent_that_writes_no_skill(distilled: Callable[..., Distilled], tmp_path: Path) -> None:
    for writer, message in (
        ("lazy-writer", r"wrote no skill/be-right/SKILL\.md; its exit status is 1"),
        ("broken-writer", "has no front matter"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            distilled(writer, "helped")
        assert "agent.log" in str(refused.value.hint)
        assert not (tmp_path / "be-right").exists()


def test_few_tries_show_nothing() -> None:
    assert intervals.compare_shares([False] * 3, [True] * 3).low < 0
    assert intervals.compare_shares([False] * 5, [True] * 5).low > 0
    single = intervals.compare_means([[1.0]], [[2.0]])
    assert (single.low, single.high) == (0.0, math.inf)
    assert intervals.compare_means([[1.0, 1.9, 1.2]], [[2.0, 1.5, 2.2]]).low < 1
    assert intervals.compare_means([[1.0, 1.1, 1.2, 1.3, 1.4]], [[2.0, 2.1, 2.2, 2.3, 2.4]]).low > 1


def test_a_skill_without_effect_rarely_seems_to_have_one() -> None:
    """The intervals promise at most one in twenty; of 60 evaluations, at most 7 are expected in all but 2 % of runs."""
    generator = random.Random(1)
    wrong = 0
    for _ in range(60):
        tries = []
        for task in range(4):
            share = generator.random()
            for number in range(10):
                is_right = generator.random() < share
                speed = max(1.0, generator.lognormvariate(0.3, 0.4)) if is_right else 1.0
                tries.append(SkillTry(f"task{task}", number < 5, is_right, speed, 1.0))
        wrong += compare_tries(tries).conclusion != "no measurable help"
    assert wrong <= 7


def test_few_intervals_of_means_leave_out_the_ratio_of_equal_groups() -> None:
    """Of 1000 with 97.5 %, 25 are expected to leave it out, and at most 36 in all but 2 % of runs."""
    generator = random.Random(2)
    missed = 0
    for _ in range(1000):
        means = [generator.gauss(0, 1) for _ in range(20)]
        groups = ([[generator.lognormvariate(mean, 0.3)] for mean in means] for _ in range(2))
        compared = intervals.compare_means(*groups)
        missed += not compared.low < 1 < compared.high
    assert missed <= 36
