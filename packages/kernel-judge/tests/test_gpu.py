"""The judge on a GPU: Triton and inline CUDA, and cheats that only a GPU makes possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judge_samples import CHEATS, GPU_CHEATS, GPU_HONEST, HONEST, note, quick, scale_project

from kernel_judge.judge.judgement import JudgeRequest, judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALED = Path(__file__).parent / "tasks" / "scaled.py"


@pytest.mark.parametrize("file", [*GPU_CHEATS, *CHEATS], ids=lambda file: f"{file.parent.parent.name}-{file.stem}")
def test_a_cheat_is_rejected_on_a_gpu(file: Path) -> None:
    if note(file, "device") == "cpu":
        pytest.skip("on a GPU it has no effect")
    verdict = judge(quick(file, device="cuda"))
    assert verdict.verdict == "wrong", verdict
    if file in GPU_CHEATS:
        assert verdict.rejected_as == note(file, "rejected-as"), verdict.reason


@pytest.mark.parametrize("file", [*GPU_HONEST, *HONEST], ids=lambda file: f"{file.parent.parent.name}-{file.stem}")
def test_an_honest_candidate_is_right_on_a_gpu(file: Path) -> None:
    if note(file, "device") == "cpu":
        pytest.skip("a candidate for CPUs")
    verdict = judge(quick(file, device="cuda"))
    assert verdict.is_right, (verdict.rejected_as, verdict.reason)


def test_a_kernel_project_is_built_for_this_gpu_and_judged(tmp_path: Path) -> None:
    verdict = judge(JudgeRequest(scale_project(tmp_path), SCALED, device="cuda", inputs=12, rounds=3))
    assert verdict.is_right, verdict.reason
