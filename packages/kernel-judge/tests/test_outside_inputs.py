"""Wrong results, and cheats that only other inputs, parameters and shapes than the task's own reveal.

All candidates run in one worker, one after another, since starting a worker takes longer than judging one of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from judge_samples import CHEATS, HERE, HONEST, TASK, Sample

from kernel_builder import toml_file
from kernel_judge.judge.judgement import JudgeRequest, judge, prepare_references
from kernel_judge.judge.outside_inputs import expected_results, outside_inputs
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.result_checks import RejectedError, ResultChecks
from kernel_judge.judge.verdict import RIGHT
from kernel_judge.judge.worker_process import WorkerProcess
from kernel_sandbox import sandbox
from kernel_tasks import read_task

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NONE, OUTSIDE = "pass", "wrong-outside-inputs"
SIZES, RAND = "rows = 24\ncolumns = 40\n", "torch.rand(rows, columns)"
TABLE = toml_file.read(HERE / "outside_inputs.toml")
MODEL = TABLE["model"]

Rejected = Callable[[Path, Path], tuple[str, str, list[str]]]


@pytest.fixture(scope="module", params=DEVICES)
def rejected(request: pytest.FixtureRequest) -> Iterator[Rejected]:
    """Return a candidate's kind of rejection, or that it is right; the reason; and the suspicious parts."""
    device = request.param
    with WorkerProcess(sandbox.strongest(), device, readable=[HERE], arena_bytes=1 << 26) as worker:
        worker.ready(120)

        def answer(file: Path, task_file: Path) -> tuple[str, str, list[str]]:
            task, choice = read_task(task_file), random.Random(1)
            references, _, suspicious = prepare_references(task, device, choice)
            source = worker.scratch / file.name
            source.write_text(file.read_text())
            worker.ask("load", str(source), "ModelNew", seconds=120)
            for number, reference in enumerate(references):
                worker.ask("model", number, *reference.model_arguments(), seconds=120)
            checks = ResultChecks(worker, references, 0.01, 30)
            try:
                checks.check([choice.getrandbits(48) for _ in range(16)])
                checks.check_outside(task, choice.getrandbits(48), 120)
            except RejectedError as error:
                assert error.case
                return error.kind, str(error), suspicious + checks.suspicious
            return RIGHT, "", suspicious + checks.suspicious

        yield answer


def written(directory: Path, entry: Mapping[str, str]) -> tuple[Path, Path]:
    """Write the candidate and the task of an entry of the table."""
    task, file = directory / "task.py", directory / "candidate.py"
    own = {"sizes": entry.get("sizes", SIZES), "inputs": entry["inputs"], "state": entry.get("state", NONE)}
    task.write_text(TASK.format(**own, body=entry["formula"]))
    file.write_text(MODEL.format(state=entry.get("candidate-state", NONE), body=entry["candidate"]))
    return file, task


@pytest.mark.parametrize("name", TABLE["cheat"])
def test_a_cheat_is_right_for_the_inputs_of_the_task_only(name: str, rejected: Rejected, tmp_path: Path) -> None:
    cheat = TABLE["cheat"][name]
    kind, reason, _ = rejected(*written(tmp_path, cheat))
    assert kind == cheat.get("rejected-as", OUTSIDE), (kind, reason)
    assert kind != OUTSIDE or reason.startswith("right for the task's own inputs, wrong for ")


@pytest.mark.parametrize("name", TABLE["wrong"])
def test_a_wrong_result_is_rejected_by_its_name(name: str, rejected: Rejected, tmp_path: Path) -> None:
    wrong = TABLE["wrong"][name]
    file, task = tmp_path / "candidate.py", tmp_path / "task.py"
    inputs = "(0.1 * torch.randn(rows, columns)).round(decimals=2)"
    task.write_text(TASK.format(sizes="rows = 24\ncolumns = 400\n", inputs=inputs, state=NONE, body=wrong["formula"]))
    file.write_text(MODEL.format(state=NONE, body="x").replace("return x", wrong["statements"]))
    assert rejected(file, task)[0] == wrong["rejected-as"]


@pytest.mark.parametrize("name", TABLE["allowed"])
def test_a_candidate_that_no_legal_input_distinguishes_is_right(name: str, rejected: Rejected, tmp_path: Path) -> None:
    allowed = TABLE["allowed"][name]
    kind, reason, suspicious = rejected(*written(tmp_path, allowed))
    assert kind == RIGHT, reason
    assert any("may ignore them" in sentence for sentence in suspicious) == allowed.get("may-ignore-its-input", False)


SAMPLES = {name: sample for name, sample in {**CHEATS, **HONEST}.items() if sample.together}


@pytest.mark.parametrize("name", SAMPLES)
def test_other_cheats_are_rejected_by_name_and_honest_candidates_are_right(
    name: str, rejected: Rejected, tmp_path: Path
) -> None:
    sample: Sample = SAMPLES[name]
    kind, reason, suspicious = rejected(sample.write(tmp_path), sample.write_task(tmp_path))
    assert kind == (sample.rejected_as or RIGHT), reason
    assert kind != RIGHT or suspicious == []


def test_the_command_has_kernelbenchs_rule(tmp_path: Path) -> None:
    file, task = written(tmp_path, TABLE["cheat"]["no negative input"])
    request = JudgeRequest(file, task, device="cpu", inputs=12, rounds=0)
    verdict = judge(request)
    assert verdict.rejected_as == OUTSIDE and verdict.failing_case
    assert verdict.failing_case["inputs"] == "inputs with random signs" and verdict.failing_case["wrong-elements"]
    verdict = judge(replace(request, inputs_of_task_only=True))
    assert verdict.is_right and "Only the task's own inputs and parameters were checked." in verdict.suspicious


def test_every_kind_of_input_is_legal_for_a_product_and_few_for_a_root(tmp_path: Path) -> None:
    kinds = {}
    for body in ("x * 3", "x.sqrt()"):
        task = tmp_path / "task.py"
        task.write_text(TASK.format(sizes=SIZES, inputs=RAND, state=NONE, body=body))
        reference = Reference(read_task(task), {"rows": 5}, None, "cpu", 1)
        kinds[body] = [name for name, given in outside_inputs(reference, 1) if expected_results(reference, given)]
    assert len(kinds["x * 3"]) == 9
    assert set(kinds["x * 3"]) - set(kinds["x.sqrt()"]) == {
        "inputs with random signs", "inputs with some negative infinities"
    }  # fmt: skip
