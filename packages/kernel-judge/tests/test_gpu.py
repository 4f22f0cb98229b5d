"""The judge on a GPU: Triton and inline CUDA, and cheats that only a GPU makes possible."""

from __future__ import annotations

from pathlib import Path

import cpu_samples
import gpu_samples
import pytest
import torch
from judge_samples import CPU, HERE, quick, scale_project

from kernel_judge.judge.judgement import JudgeRequest, judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CHEATS, HONEST = (
    {**for_gpus, **{name: sample for name, sample in for_any.items() if sample.device != CPU}}
    for for_gpus, for_any in (
        (gpu_samples.CHEATS, cpu_samples.CHEATS),
        (gpu_samples.HONEST, cpu_samples.HONEST),
    )
)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_rejected_on_a_gpu(name: str, tmp_path: Path) -> None:
    verdict = judge(quick(CHEATS[name], tmp_path, device="cuda"))
    assert verdict.verdict == "wrong", verdict
    if name in gpu_samples.CHEATS:
        assert verdict.rejected_as == CHEATS[name].rejected_as, verdict.reason


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_candidate_is_right_on_a_gpu(name: str, tmp_path: Path) -> None:
    verdict = judge(quick(HONEST[name], tmp_path, device="cuda"))
    assert verdict.is_right, (verdict.rejected_as, verdict.reason)


def test_a_kernel_project_is_built_for_this_gpu_and_judged(tmp_path: Path) -> None:
    task = HERE / "tasks" / "scaled.py"
    verdict = judge(JudgeRequest(scale_project(tmp_path), task, device="cuda", inputs=12, rounds=3))
    assert verdict.is_right, verdict.reason
