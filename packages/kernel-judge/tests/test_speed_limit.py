"""The limit of a task on this device: its bytes and operations, and the score of a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from judge_samples import HERE, SMALL_TASKS

from kernel_builder.api import clock
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.speed_limit import Limit, measure_limit
from kernel_judge.judge.speed_report import TimedShape, report_speed
from kernel_tasks import read_task


def of(task: Path, dtype: str | None = None) -> Reference:
    read = read_task(task)
    reference = Reference(read, read.sizes(), dtype, "cpu", 0)
    reference.count_operations()
    return reference


def test_bytes_and_operations_are_those_of_the_shapes(tmp_path: Path) -> None:
    powers = of(HERE / "tasks" / "powers.py")
    assert powers.moved(powers.arguments(1)) == (4 * (32 * 128 + 128 * 128), 4 * 32 * 128)
    assert powers.operations == 24 * 2 * 32 * 128 * 128
    softmax = of(HERE / "tasks" / "softmax.py", "bfloat16")
    assert softmax.moved(softmax.arguments(1)) == (2 * (48 * 256 + 256), 2 * 48 * 256)
    assert softmax.operations == 0
    (tmp_path / "tied.py").write_text(SMALL_TASKS["tied"])
    tied = of(tmp_path / "tied.py")
    assert tied.moved(tied.arguments(1))[0] == 4 * (32 * 64 + 64 * 64), "equal storage is read once"


def test_speeds_are_measured_on_this_device() -> None:
    reference = of(HERE / "tasks" / "powers.py")
    limit = measure_limit(reference, reference.arguments(1), clock("cpu"))
    assert limit.matrix_speed and 1e8 < limit.matrix_speed < 1e14 and 1e8 < limit.memory_speed < 1e13
    assert limit.seconds == pytest.approx(reference.operations / limit.matrix_speed), "it is bound by operations"


@pytest.mark.parametrize(("seconds", "score"), [(4.0, 0.5), (1.0, 1.0), (0.5, 1.0), (2.5, 2 / 3), (7.0, 1 / 3)])
def test_the_score_is_a_half_at_the_baseline_and_one_at_the_limit(seconds: float, score: float) -> None:
    limit = Limit(bytes=2000, operations=300, memory_speed=2000.0, matrix_speed=400.0)
    assert limit.sol_score(seconds, baseline=4.0) == pytest.approx(score)
    assert limit.sol_score(seconds, baseline=0.9) == (1.0 if seconds <= 1 else 0.0)


@pytest.mark.parametrize(
    ("candidate", "eager", "reported"), [(1e-9, 1.0, True), (1e-9, 1e-9, False), (1.0, 1.0, False)]
)
def test_a_time_below_the_limit_is_suspicious_unless_eagers_is_too(
    candidate: float, eager: float, *, reported: bool
) -> None:
    reference = of(HERE / "tasks" / "scaled.py")
    samples = {"candidate": [candidate] * 3, "eager": [eager] * 3}
    shape = TimedShape(reference, reference.arguments(1), 1, samples)
    report = report_speed([shape], clock("cpu"))
    assert any("faster than this device's limit" in fact for fact in report.suspicious) == reported
    assert report.share_of_limit and report.sol_score is not None
    (case,) = report.cases
    assert case["bytes"] == 40000 and case["operations"] == 0 and case["limit"]["gigabytes-per-second"] > 0.1
