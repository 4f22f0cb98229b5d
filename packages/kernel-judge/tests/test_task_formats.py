"""Tasks and candidates in the public formats: a right candidate is accepted, a wrong one is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kernel_builder.cli import main
from kernel_format.errors import ConfigError
from kernel_judge.judge.judgement import JudgeRequest, judge
from kernel_judge.judge.verdict import Verdict
from kernel_tasks import read_task

# Any two terms whose sum is the input are right, so that a comparison with the reference's would be wrong.
GPU_MODE = {
    "tools/utils.py": "def is_near(a, b):\n    return bool(((a - b).abs() < 1e-5).all())\n",
    "split/task.yml": """
lang: py
files:
  - {name: submission.py, source: "@SUBMISSION@"}
  - {name: utils.py, source: ../tools/utils.py}
  - {name: reference.py, source: reference.py}
tests:
  - {rows: 3, seed: 1}
benchmarks:
  - {rows: 40, seed: 2}
""",
    "split/reference.py": """
import torch
from utils import is_near


def generate_input(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 8, generator=generator), torch.empty(rows, 8)


def ref_kernel(data):
    x, buffer = data
    buffer[...] = x / 2
    return buffer, x / 2


def check_implementation(data, output):
    a, b = output
    return (True, "") if is_near(a + b, data[0]) else (False, "the sum is wrong")
""",
}


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def verdict(candidate: Path, task: Path, **options: Any) -> Verdict:
    settings: dict[str, Any] = {"inputs": 8, "rounds": 0, "peers": ("eager",), "device": "cpu"}
    return judge(JudgeRequest(candidate, task, **(settings | options)))


@pytest.fixture
def gpu_mode(tmp_path: Path) -> Path:
    return write(tmp_path / "problems", GPU_MODE) / "split"


def test_a_gpu_mode_task_has_its_own_rule_workloads_and_modules(gpu_mode: Path, tmp_path: Path) -> None:
    submission = tmp_path / "submission.py"
    submission.write_text("import utils\n\n\ndef custom_kernel(data):\n    return data[0] / 4, 3 * data[0] / 4\n")
    right = verdict(submission, gpu_mode, rounds=1, seed=1)
    assert right.is_right, right.reason
    assert [case["sizes"]["rows"] for case in right.cases] == [40]
    submission.write_text("def custom_kernel(data):\n    return data[0] / 2, data[0] / 3\n")
    wrong = verdict(submission, gpu_mode)
    assert wrong.rejected_as == "wrong-result" and "the sum is wrong" in wrong.reason
    submission.write_text("def custom_kernel(data):\n    return data[0].abs() / 2, data[0] / 2\n")
    assert "random signs" in verdict(submission, gpu_mode).reason
    assert verdict(submission, gpu_mode, inputs_of_task_only=True).is_right, "the task has no negative inputs"


def test_a_saved_task_is_complete(gpu_mode: Path, tmp_path: Path) -> None:
    task = read_task(gpu_mode)
    saved = read_task(task.save(tmp_path / "saved"))
    assert saved.digest == task.digest and saved.name == task.name and saved.workloads == task.workloads
    assert saved.problem(saved.sizes()).get_inputs()[0][0].shape == (40, 8)
    text = " ".join(task.description())
    assert "custom_kernel(data)" in text and "rows=40" in text and "check_implementation" in text


def test_a_task_that_needs_a_gpu_exits_with_11(gpu_mode: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    reference = gpu_mode / "reference.py"
    reference.write_text(reference.read_text().replace("torch.empty(rows, 8)", 'torch.empty(rows, 8, device="cuda")'))
    submission = tmp_path / "submission.py"
    submission.write_text("def custom_kernel(data):\n    return data\n")
    done = CliRunner().invoke(main, ["judge", str(submission), "--task", str(gpu_mode)])
    assert done.exit_code == 11 and "reference.py: generate_input needs a GPU" in done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("task.yml", "lang: py", "lang: cu", "task.yml: lang: is 'cu'; expected \"py\""),
        ("task.yml", "lang: py", "lang: py\nmulti_gpu: true", "task.yml: multi_gpu: is true"),
        ("task.yml", "benchmarks:", "ranked:", "task.yml: benchmarks: expected a list"),
        ("task.yml", "../tools/utils.py", "../utils.py", "task.yml: files: ../utils.py cannot be read"),
        ("reference.py", "def ref_kernel", "def ref", "reference.py: defines no ref_kernel"),
        ("reference.py", "return torch.rand", "return slice(3), torch.rand", "returns a builtins.slice"),
    ],
)
def test_a_bad_gpu_mode_task_names_the_key(gpu_mode: Path, file: str, old: str, new: str, message: str) -> None:
    path = gpu_mode / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as caught:
        task = read_task(gpu_mode)
        task.problem(task.sizes()).get_inputs()
    assert message in str(caught.value)
