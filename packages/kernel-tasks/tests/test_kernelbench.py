"""KernelBench's problem files, and the settings beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from kernel_tasks import read_task

TRAINED = Path(__file__).parents[2] / "kernel-judge" / "tests" / "tasks" / "trained"


def test_sizes_are_the_integers_that_the_file_assigns(problem: Path) -> None:
    task = read_task(problem)
    assert task.sizes() == {"batch": 4096, "width": 16384, "kernel": 3}
    assert task.name == "7_Linear"
    other = task.problem({"batch": 5, "width": 7})
    assert other.get_inputs()[0].shape == (5, 7) and other.get_init_inputs() == [7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tolerance = 2.0", "tolerance: expected a number above 0 and at most 0.1, got 2.0"),
        ("dtypes = ['float8']", "expected an array with names from float32, float16, bfloat16, got ['float8']"),
        ("[sizes]\nwidht = 3", "'widht' is not a size of 7_Linear.py; expected one of batch, width, kernel"),
        ("backward = 1", "backward: expected true or false, got 1"),
        ("color = 'red'", "color: unknown key; expected one of dtypes"),
        ("tolerance = ", "is not TOML: Invalid value"),
    ],
)
def test_settings_that_are_not_valid_name_the_key(problem: Path, settings: str, message: str) -> None:
    problem.with_suffix(".toml").write_text(settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_task(problem)


def test_a_task_that_cannot_be_read_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_task(tmp_path / "nothing.py")
    with pytest.raises(ConfigError, match=r"is in none of the task formats; expected one of: .*KernelBench: a Python"):
        read_task(tmp_path)
    (tmp_path / "task.py").write_text("def get_inputs(): pass")
    with pytest.raises(ConfigError, match="defines no Model"):
        read_task(tmp_path).problem({})


def test_the_digest_covers_the_problem_and_its_settings(problem: Path) -> None:
    before = read_task(problem).digest
    problem.with_suffix(".toml").write_text("tolerance = 0.001")
    assert read_task(problem).digest != before
    assert read_task(problem).settings.tolerance == 0.001
    assert read_task(TRAINED).settings.backward
