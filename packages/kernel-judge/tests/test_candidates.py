"""The judge rejects every cheat by its name, and passes every honest candidate; a GPU has cheats of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from judge_samples import CHEATS, CPU, GPU_CHEATS, GPU_HONEST, HERE, HONEST, Sample, quick, scale_project

from kernel_judge.judge.judgement import JudgeRequest, judge

pytestmark = pytest.mark.attack

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def judged(for_any: dict[str, Sample], for_gpus: dict[str, Sample]) -> list[object]:
    """Return the samples with their devices. `test_outside_inputs.py` judges the other ones of a CPU in one process."""
    alone = [pytest.param(name, sample, "cpu", id=name) for name, sample in for_any.items() if not sample.together]
    anywhere = {name: sample for name, sample in for_any.items() if sample.device != CPU}
    on_gpu = {**for_gpus, **anywhere}.items()
    return [*alone, *(pytest.param(name, sample, "cuda", id=f"{name}, GPU", marks=gpu) for name, sample in on_gpu)]


@pytest.mark.parametrize(("name", "sample", "device"), judged(CHEATS, GPU_CHEATS))
def test_a_cheat_is_rejected_by_its_name(name: str, sample: Sample, device: str, tmp_path: Path) -> None:
    verdict = judge(quick(sample, tmp_path, device=device))
    assert verdict.verdict == "wrong" and verdict.reason and not verdict.speed, verdict
    if device == "cpu" or name in GPU_CHEATS:
        assert verdict.rejected_as == sample.rejected_as, verdict.reason


@pytest.mark.parametrize(("name", "sample", "device"), judged(HONEST, GPU_HONEST))
def test_an_honest_candidate_is_right(name: str, sample: Sample, device: str, tmp_path: Path) -> None:
    verdict = judge(quick(sample, tmp_path, device=device))
    assert verdict.is_right, (verdict.rejected_as, verdict.reason)
    assert not verdict.speed or verdict.speed["eager"].ratio > 0


@gpu
def test_a_candidate_is_not_judged_while_another_process_holds_the_memory(tmp_path: Path) -> None:
    """The same candidate is wrong if it takes the memory itself."""
    sample = Sample("scaled", "return 3.0 * x + torch.empty(4 << 30, device=x.device)[:1] * 0")
    hold = "import torch; free, _ = torch.cuda.mem_get_info(); x = torch.empty(free - (12 << 30), dtype=torch.uint8, "
    command = [sys.executable, "-c", f"{hold}device='cuda'); print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        verdict = judge(quick(sample, tmp_path, device="cuda"))
        other.communicate(b"\n")
    assert verdict.verdict == "not judged" and "other processes hold" in verdict.reason, verdict.reason
    taking = Sample("scaled", "return [torch.empty(1 << 38, device=x.device), 3.0 * x][1]")
    assert judge(quick(taking, tmp_path, device="cuda")).rejected_as == "raised"


@gpu
def test_a_kernel_project_is_built_for_this_gpu_and_judged(tmp_path: Path) -> None:
    task = HERE / "tasks" / "scaled.py"
    verdict = judge(JudgeRequest(scale_project(tmp_path), task, device="cuda", inputs=12, rounds=3))
    assert verdict.is_right, verdict.reason
