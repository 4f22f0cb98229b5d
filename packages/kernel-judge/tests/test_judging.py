"""The command, kernel projects as candidates, and the limits of the sandboxes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from judge_samples import CHEATS, HERE, HONEST, PROJECT_CANDIDATE, SMALL_TASKS, Sample, scale_project

from kernel_builder.api import build_for_device
from kernel_judge.judge import judgement
from kernel_judge.judge.gpu_memory import is_exhausted, is_much
from kernel_judge.judge.judgement import JudgeRequest, judge
from kernel_judge.judge.speed_report import SpeedReport
from kernel_judge.judge.verdict import Verdict
from kernel_judge.search.local_judge import JUDGE_COMMAND, LocalJudge
from tests.support.cli import expect, invoke
from tests.support.files import replace

SOFTMAX = HERE / "tasks" / "softmax.py"
SCALED = HERE / "tasks" / "scaled.py"
QUICK = ("--inputs", "8", "--rounds", "0", "--device", "cpu")


def test_the_command_prints_a_verdict_and_exits_by_it(tmp_path: Path) -> None:
    right = HONEST["float64"].write(tmp_path)
    verdict = Verdict.from_dict(json.loads(expect(0, "", "judge", right, "--task", SOFTMAX, *QUICK, "--json").stdout))
    assert verdict.is_right and verdict.task == "softmax" and not verdict.speed
    assert len(verdict.task_digest) == len(verdict.candidate_digest) == 64
    wrong = expect(1, "wrong: softmax", "judge", CHEATS["some NaN"].write(tmp_path), "--task", SOFTMAX, *QUICK)
    assert "not-finite: 1 of" in wrong.stdout and '"seed"' in wrong.stdout


def test_unreadable_arguments_exit_with_2(tmp_path: Path) -> None:
    right = Sample("stored", "return 2 * x").write(tmp_path)
    for arguments, words in (
        ((right, "--task", tmp_path / "none.py"), "does not exist"),
        ((tmp_path / "none.py", "--task", SOFTMAX), "does not exist; expected a candidate"),
        ((HERE / "tasks", "--task", SOFTMAX), "has no build.toml"),
        ((right, "--task", SOFTMAX, "--against", "eager,jax"), "'jax' is not a peer; expected names"),
    ):
        expect(2, words, "judge", *arguments)


@pytest.mark.attack
@pytest.mark.parametrize("task", SMALL_TASKS["refused"])
def test_a_task_whose_results_do_not_tell_right_from_wrong_is_refused(task: str, tmp_path: Path) -> None:
    sample = Sample(task, "return 2 * x", state="")
    arguments = [sample.write(tmp_path), "--task", sample.write_task(tmp_path), *QUICK]
    expect(2, SMALL_TASKS["refused"][task], "judge", *arguments)


def test_a_kernel_project_is_built_and_judged(tmp_path: Path) -> None:
    """Also under a Torch for CUDA, which loads the CPU package of the project."""
    project = scale_project(tmp_path / "right")
    as_typed = 'torch.version.cuda = "13.0"\nkernel = get_local_kernel(Path(__file__).parent)'
    (project / "candidate.py").write_text(re.sub("kernel = .*", as_typed, PROJECT_CANDIDATE))
    before = sorted(project.rglob("*"))
    verdict = judge(JudgeRequest(project, SCALED, device="cpu", inputs=8, rounds=0))
    assert verdict.is_right, verdict.reason
    assert sorted(project.rglob("*")) == before, "the candidate's directory is not touched"
    wrong = scale_project(tmp_path / "refused", "out[i] = nothing")
    refused = judge(JudgeRequest(wrong, SCALED, device="cpu", rounds=0))
    assert refused.rejected_as == "build-failed" and "scale_cpu.cpp" in refused.reason
    assert str(tmp_path) not in refused.reason and "nothing" in refused.reason


def test_packages_that_another_machine_has_built_are_judged_without_a_build(tmp_path: Path) -> None:
    project = scale_project(tmp_path)
    absent = "no package for cpu that this machine loads (built: none)"
    expect(11, absent, "judge", project, "--task", SCALED, *QUICK, "--no-build")
    build_for_device(project, "cpu")
    replace(project / "scale" / "scale_cpu.cpp", "out[i] = factor * in[i]", "out[i] = nothing")
    verdict = judge(JudgeRequest(project, SCALED, device="cpu", inputs=8, rounds=0, is_built=True))
    assert verdict.is_right, verdict.reason
    assert any(sentence.startswith("The judge did not build its packages") for sentence in verdict.suspicious)


def test_a_project_without_a_kernel_for_this_machine_is_not_judged(tmp_path: Path) -> None:
    project = scale_project(tmp_path)
    replace(project / "build.toml", '["cpu", "cuda"]', '["cuda"]')
    done = expect(11, "this machine cannot build it for cpu", "judge", project, "--task", SCALED, *QUICK)
    assert done.stdout.startswith("not judged: ") and "no variant to build here" in done.stdout
    judged = LocalJudge(SCALED, seconds=120, command=(*JUDGE_COMMAND, *QUICK)).judge(project)
    assert judged.verdict is None and judged.error and judged.error.startswith("not judged: this machine cannot")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_candidate_for_a_gpu_is_not_judged_without_one(tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.py"
    candidate.write_text(
        "import torch\n\nclass ModelNew(torch.nn.Module):\n"
        "    def forward(self, x):\n        return 3.0 * torch.ones(1, device='cuda') * x\n"
    )
    verdict = judge(JudgeRequest(candidate, SCALED, inputs=2, rounds=0))
    assert (verdict.verdict, verdict.rejected_as, verdict.is_right) == ("not judged", None, False)
    assert verdict.reason.startswith("it needs a GPU, and Torch finds none: ")
    arguments = [candidate, "--task", SCALED, "--device", "cuda", "--json"]
    expect(11, "it is to run on a GPU, and Torch finds none", "judge", *arguments)
    assert Verdict.from_dict(json.loads(verdict.to_json())).as_dict() == verdict.as_dict()


def test_a_candidate_is_not_judged_without_the_package_that_it_needs(tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.py"
    candidate.write_text("import cutlass_unknown\n")
    assert judge(JudgeRequest(candidate, SCALED, inputs=2, rounds=0)).rejected_as == "raised"
    candidate.write_text("raise ModuleNotFoundError(\"No module named 'tvm_ffi'\")\n")
    verdict = judge(JudgeRequest(candidate, SCALED, inputs=2, rounds=0))
    assert verdict.verdict == "not judged" and verdict.reason.startswith("it needs a program or package that is not")


def test_a_candidate_is_wrong_by_its_own_use_of_memory_only() -> None:
    assert is_exhausted("cuMemAlloc_v2 of 3072 MiB answers CUDA_ERROR_OUT_OF_MEMORY")
    assert is_exhausted("CUDA error: CUBLAS_STATUS_ALLOC_FAILED") and not is_exhausted("CUDA error: misaligned address")
    assert is_much(40 << 30, 139 << 30) and not is_much(2 << 30, 139 << 30)


@pytest.mark.parametrize(
    "call", ["import kernel_builder\nx = kernel_builder.load('', 'f')", "from kernel_builder import load"]
)
def test_a_candidate_that_needs_the_builders_compilers_is_refused_in_words(call: str, tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.py"
    candidate.write_text(f"# kernel_builder.load\n{call}\n")
    verdict = judge(JudgeRequest(candidate, SCALED, device="cpu", inputs=2, rounds=0))
    assert verdict.rejected_as == "build-failed" and "use load_inline" in verdict.reason


def test_the_first_line_names_the_peers_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(judgement, "measure_speed", lambda worker, peers, *_: SpeedReport(missing_peers=peers.missing))
    # Later numbers of `random.Random`, the seeds of timed inputs, follow from those that the candidate has seen.
    monkeypatch.setattr(judgement, "random", SimpleNamespace(SystemRandom=random.SystemRandom))
    right = HONEST["float64"].write(tmp_path)
    options = ["--rounds", "1", "--device", "cpu", "--against", "eager,compile"]
    done = invoke("judge", right, "--task", SOFTMAX, *QUICK[:2], *options)
    first, *others = done.stdout.splitlines()
    assert first.endswith(" s, without compile"), done.stdout
    assert any("not compared with compile: it was not ready within" in line for line in others)


def test_inputs_that_take_long_to_draw_are_few_in_a_timed_run(tmp_path: Path) -> None:
    task, candidate = tmp_path / "task.py", tmp_path / "candidate.py"
    task.write_text(SMALL_TASKS["slow_inputs"])
    candidate.write_text(task.read_text().replace("Model(", "ModelNew("))
    verdict = judge(JudgeRequest(candidate, task, "cpu", 4, 1, ("eager",)))
    assert verdict.is_right and verdict.cases[0]["calls"] <= 10, verdict


def test_the_output_of_a_compiler_is_in_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import subprocess\nfrom pathlib import Path\nimport torch\n\n"
        "Path('kernel.c').write_text('int main( { return 0; }')\n"
        "subprocess.run(['cc', '-c', 'kernel.c'], check=True)\n\n"
        "class ModelNew(torch.nn.Module):\n    pass\n"
    )
    verdict = judge(JudgeRequest(tmp_path / "broken.py", SOFTMAX, inputs=8, rounds=0, device="cpu"))
    assert verdict.rejected_as == "raised", verdict
    assert "it printed: kernel.c:1" in verdict.reason and "error: expected" in verdict.reason
