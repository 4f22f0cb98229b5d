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
from cpu_samples import CHEATS as SAMPLED_CHEATS
from cpu_samples import HONEST
from judge_samples import HERE, TASK, Sample

from kernel_judge.judge.judgement import JudgeRequest, judge, prepare_references
from kernel_judge.judge.outside_inputs import expected_results, outside_inputs
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.result_checks import RejectedError, ResultChecks
from kernel_judge.judge.verdict import RIGHT
from kernel_judge.judge.worker_process import WorkerProcess
from kernel_sandbox import sandbox
from kernel_tasks import read_task

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODEL = """import torch


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {state}

    def forward(self, x):
        return {body}
"""
NONE = "pass"
SIZES, LITERAL = "rows = 24\ncolumns = 40\n", ""
RAND, RANDN = "torch.rand(rows, columns)", "torch.randn(rows, columns)"
FUNCTIONS = "torch.nn.functional"
NORM = "self.norm = torch.nn.LayerNorm(40)"
SCORES = "(x @ x.flip(-1).t() / 8)"
MASK = "torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()"
OUTSIDE = "wrong-outside-inputs"
# The task: sizes, inputs, state, formula. The candidate: its state, its formula.
CHEATS = {
    "no negative input": (SIZES, RAND, NONE, "torch.relu(x)", NONE, "x.clone()"),
    "softmax without its maximum": (SIZES, RANDN, NONE, "x.softmax(-1)", NONE, "x.exp() / x.exp().sum(-1, True)"),
    "sigmoid that overflows": (SIZES, RANDN, NONE, "x.sigmoid()", NONE, "x.exp() / (1 + x.exp())"),
    "product by logarithms": (SIZES, RAND, NONE, "x[:, :4].prod(-1)", NONE, "x[:, :4].log().sum(-1).exp()"),
    "norm of zeros": (SIZES, RANDN, NONE, f"{FUNCTIONS}.normalize(x)", NONE, "x / x.norm(dim=-1, keepdim=True)"),
    "attention masked with a number": (
        SIZES, "0.1 * torch.randn(rows, columns)", NONE, f"{SCORES}.masked_fill(~{MASK}, -torch.inf).softmax(-1) @ x",
        NONE, f"{SCORES}.masked_fill(~{MASK}, -30.0).softmax(-1) @ x",
    ),
    "norm without its parameters": (SIZES, RANDN, NORM, "self.norm(x)", NONE, f"{FUNCTIONS}.layer_norm(x, (40,))"),
    "parameters that are not used": (
        SIZES, RANDN, NORM, "self.norm(x)", NORM, f"{FUNCTIONS}.layer_norm(x, (40,))",
    ),
    "the shapes of the file only": (
        LITERAL, "torch.rand(24, 40)", NONE, "torch.tanh(x)", NONE,
        "torch.tanh(x) if x.shape == (24, 40) else torch.zeros_like(x)",
    ),
    "an expected value": (
        "rows = 6\ncolumns = 4096\n", "0.01 * torch.rand(rows, columns)", NONE, "x.mean(-1)", NONE,
        "torch.full_like(x[:, 0], 0.005)",
    ),
}  # fmt: skip
OTHER_NAMES = {"the shapes of the file only": "wrong-result", "an expected value": "constant-result"}
SOFTMAX = "x.softmax(-1)"
LARGEST = "(*x.softmax(-1).topk(4, -1), x.argmax(0))"
# The name of the failure, the formula of the task, the statements of the candidate.
WRONG = {
    "zeros": ("constant-result", SOFTMAX, "return torch.zeros_like(x)"),
    "not computed": ("wrong-result", SOFTMAX, "return torch.empty_like(x)"),
    "an end that is not written": (
        "wrong-result", SOFTMAX, "y = torch.empty_like(x); y.view(-1)[:-3] = x.softmax(-1).view(-1)[:-3]; return y",
    ),
    "noise": ("inaccurate", SOFTMAX, "y = x.softmax(-1); return y * (1 + 1e-4 * torch.randn_like(y))"),
    "transposed memory": ("inaccurate", SOFTMAX, "return x.softmax(-1).t().contiguous().view(x.shape)"),
    "another dtype": ("wrong-dtype", SOFTMAX, "return x.softmax(-1).half()"),
    "another shape": ("wrong-shape", SOFTMAX, "return x[:1].softmax(-1)"),
    "shared memory": ("wrong-strides", "x.mean(-1, True).expand_as(x).clone()", "return x.mean(-1, True).expand_as(x)"),
    "a changed input": ("input-changed", SOFTMAX, "y = x.softmax(-1); x.zero_(); return y"),
    "one index for equal elements": (
        "wrong-result", LARGEST, "y, i = x.softmax(-1).topk(4, -1); i[:, 1] = i[:, 0]; return y, i, x.argmax(0)",
    ),
}  # fmt: skip
# Not wrong: no input of the task's kind, and no other legal one, tells these from the reference.
ALLOWED = {
    "places among probabilities that are rounded to 0": (
        SIZES, RANDN, NONE, "x.float().softmax(-1).topk(4).indices", NONE, "x.topk(4).indices",
    ),
    "illegal inputs are left out": (SIZES, RAND, NONE, "x.sqrt()", NONE, "x.abs().sqrt()"),
    "the place of a maximum among ties": (
        SIZES, RANDN, NONE, "x.argmax(-1)", NONE, "x.shape[-1] - 1 - x.flip(-1).argmax(-1)",
    ),
    "a transform of functions": (
        SIZES, RANDN, NONE, "torch.relu(x) + x.amax(-1, True)",
        NONE, "torch.vmap(lambda row: row.clamp(min=0) + row.max())(x)",
    ),
    "other orders of equal elements": (
        SIZES, "torch.randn(rows, columns).round(decimals=1)", NONE, "x.softmax(-1).topk(4, -1)",
        NONE, "[part[:, :4] for part in x.softmax(-1).sort(dim=-1, descending=True, stable=True)]",
    ),
    "parameters in another form": (
        SIZES, RANDN, NORM, "self.norm(x)",
        "self.both = torch.nn.Parameter(torch.stack([torch.ones(40), torch.zeros(40)]))",
        f"{FUNCTIONS}.layer_norm(x, (40,), self.both[0], self.both[1])",
    ),
    "a constant reference": (SIZES, RANDN, NONE, "(x - x) * 2", NONE, "torch.zeros_like(x)"),
}  # fmt: skip

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


def written(directory: Path, name: str, table: Mapping[str, tuple[str, ...]]) -> tuple[Path, Path]:
    sizes, inputs, state, body, own_state, own_body = table[name]
    task, file = directory / "task.py", directory / "candidate.py"
    task.write_text(TASK.format(sizes=sizes, inputs=inputs, state=state, body=body))
    file.write_text(MODEL.format(state=own_state, body=own_body))
    return file, task


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_right_for_the_inputs_of_the_task_only(name: str, rejected: Rejected, tmp_path: Path) -> None:
    kind, reason, _ = rejected(*written(tmp_path, name, CHEATS))
    assert kind == OTHER_NAMES.get(name, OUTSIDE), (kind, reason)
    assert kind != OUTSIDE or reason.startswith("right for the task's own inputs, wrong for ")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_rejected_by_its_name(name: str, rejected: Rejected, tmp_path: Path) -> None:
    kind, formula, statements = WRONG[name]
    file, task = tmp_path / "candidate.py", tmp_path / "task.py"
    inputs = "(0.1 * torch.randn(rows, columns)).round(decimals=2)"
    task.write_text(TASK.format(sizes="rows = 24\ncolumns = 400\n", inputs=inputs, state=NONE, body=formula))
    file.write_text(MODEL.format(state=NONE, body="x").replace("return x", statements))
    assert rejected(file, task)[0] == kind


@pytest.mark.parametrize("name", ALLOWED)
def test_a_candidate_that_no_legal_input_distinguishes_is_right(name: str, rejected: Rejected, tmp_path: Path) -> None:
    kind, reason, suspicious = rejected(*written(tmp_path, name, ALLOWED))
    assert kind == RIGHT, reason
    assert any("may ignore them" in sentence for sentence in suspicious) == (name in list(ALLOWED)[-2:])


SAMPLES = {name: sample for name, sample in {**SAMPLED_CHEATS, **HONEST}.items() if sample.together}


@pytest.mark.parametrize("name", SAMPLES)
def test_other_cheats_are_rejected_by_name_and_honest_candidates_are_right(
    name: str, rejected: Rejected, tmp_path: Path
) -> None:
    sample: Sample = SAMPLES[name]
    kind, reason, suspicious = rejected(sample.write(tmp_path), sample.write_task(tmp_path))
    assert kind == (sample.rejected_as or RIGHT), reason
    assert kind != RIGHT or suspicious == []


def test_the_command_has_kernelbenchs_rule(tmp_path: Path) -> None:
    file, task = written(tmp_path, "no negative input", CHEATS)
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
