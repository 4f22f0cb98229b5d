"""Changing the sizes of tasks, comparing results, and verdicts as JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from judge_samples import TASK

from kernel_judge.judge.comparison import ErrorRule, difference
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.scaling import fitted, unseen
from kernel_judge.judge.verdict import Speedup, Verdict
from kernel_tasks import read_task

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "tasks").glob("*.py"))


def test_sizes_are_halved_until_a_call_fits(problem: Path) -> None:
    task = read_task(problem)
    sizes = fitted(task, "cpu")
    assert 16 <= sizes["width"] < 4096 and sizes["kernel"] == 3
    assert sizes["width"] * sizes["width"] * 4 <= 24 << 20


def test_unseen_sizes_leave_the_constructor_as_it_is(problem: Path) -> None:
    sizes = {"batch": 64, "width": 128, "kernel": 3}
    chosen = unseen(read_task(problem), sizes, 3, random.Random(1))
    assert len(chosen) == 3
    assert all(sizes["width"] == 128 and sizes["kernel"] == 3 and 1 <= sizes["batch"] < 64 for sizes in chosen)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_example_tasks_can_be_judged_at_other_sizes_in_float64(file: Path) -> None:
    task = read_task(file)
    for shape in task.settings.shapes:
        sizes = {**task.sizes(), **shape}
        assert unseen(task, sizes, 3, random.Random(1))
        for dtype in task.settings.dtypes or (None,):
            reference = Reference(task, sizes, dtype, "cpu", 1)
            assert reference.has_exact and not reference.may_change
            assert len(reference.results) > len(reference.arguments(1).tensors), "results and gradients"


def test_a_verdict_survives_json() -> None:
    verdict = Verdict(
        "right", "", None, None, "t", "a" * 64, "b" * 64, "landlock", "cpu", 1.5, {"eager": Speedup(2.0, 1.9, 2.1)}
    )
    read = Verdict.from_dict(json.loads(verdict.to_json()))
    assert read.to_json() == verdict.to_json() and read.is_right and read.speed == verdict.speed
    assert verdict.as_dict()["rejected-as"] is None
    for text in ("", "[]", "{}", verdict.to_json().replace('"right"', '"maybe"')):
        with pytest.raises(ValueError):
            Verdict.from_dict(json.loads(text))


def test_infinities_and_nan_of_the_reference_are_right_in_their_places_only() -> None:
    exact = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    eager = exact.float()
    assert difference([eager], [eager], [exact], 0.01, None) is None
    for wrong in ([1.0, -torch.inf, -torch.inf, torch.nan], [1.0, torch.inf, -torch.inf, 0.0], [torch.nan] * 4):
        assert difference([torch.tensor(wrong)], [eager], [exact], 0.01, None)


def test_an_element_at_which_eager_fails_is_left_to_the_rule_of_errors() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([1.0, 2.5])
    assert difference([torch.tensor([1.0, 2.4])], [eager], [exact], 0.01, None) is None
    assert difference([torch.tensor([1.4, 2.0])], [eager], [exact], 0.01, None)
    zero, noise = torch.tensor([1e-17, 0.0], dtype=torch.float64), torch.tensor([1e-8, 0.0])
    assert difference([torch.tensor([0.0, 3e-8])], [noise], [zero], 0.01, None) is None
    assert difference([torch.tensor([0.0, 5e-8])], [noise], [zero], 0.01, None)
    rule = ErrorRule(0.01)
    rule.add([torch.tensor([1.0, 5.0])], [eager], [exact])
    assert "its error" in (rule.fault() or "")


def test_complex_numbers_have_twice_the_precision_in_float64(tmp_path: Path) -> None:
    text = TASK.format(sizes="", inputs="torch.randn(8, dtype=torch.complex64)", state="pass", body="3 * x")
    (tmp_path / "task.py").write_text(text)
    reference = Reference(read_task(tmp_path / "task.py"), {}, None, "cpu", 1)
    (exact,) = reference.exact(reference.arguments(2)) or ()
    assert reference.has_exact and exact.dtype == torch.float64
