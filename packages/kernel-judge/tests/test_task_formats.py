"""Tasks and candidates in the public formats: a right candidate is accepted, a wrong one is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from judge_samples import HERE

from kernel_builder import toml_file
from kernel_format.errors import ConfigError
from kernel_format.files import LFS_POINTER
from kernel_judge.judge.candidate import frozen, read_candidate
from kernel_judge.judge.judgement import JudgeRequest, judge
from kernel_judge.judge.verdict import Verdict
from kernel_judge.leaderboard.result import texts_of_task
from kernel_tasks import Task, read_task
from tests.support.cli import expect
from tests.support.files import replace
from tests.support.files import write_files as write

TEXTS = toml_file.read(HERE / "task_formats.toml")
DESTINATIONS, CPP = TEXTS["candidates"]["destinations"], TEXTS["candidates"]["cpp"]
SUBMISSIONS = TEXTS["submissions"]
# `expr` axes, a scalar, and destinations after the inputs.
DEFINITION, WORKLOAD = json.loads((HERE / "halves.json").read_text()).values()


def verdict(candidate: Path, task: Path, **options: Any) -> Verdict:
    settings: dict[str, Any] = {"inputs": 8, "rounds": 0, "peers": ("eager",), "device": "cpu"}
    return judge(JudgeRequest(candidate, task, **(settings | options)))


@pytest.fixture
def gpu_mode(tmp_path: Path) -> Path:
    return write(tmp_path / "problems", TEXTS["gpu-mode"]) / "split"


def verdict_of(text: str, task: Path, **options: Any) -> Verdict:
    """Judge a submission to a task of GPU MODE."""
    submission = task.parents[1] / "submission.py"
    submission.write_text(text)
    return verdict(submission, task, **options)


def test_a_gpu_mode_task_has_its_own_rule_workloads_and_modules(gpu_mode: Path) -> None:
    right = verdict_of(SUBMISSIONS["right"], gpu_mode)
    assert right.is_right, right.reason
    right = verdict_of(SUBMISSIONS["in-place"], gpu_mode, rounds=1, seed=1)
    assert right.is_right, f"the format lets a submission write to inputs and over its last result: {right.reason}"
    assert [case["sizes"]["rows"] for case in right.cases] == [40]
    wide = verdict_of("def custom_kernel(data):\n    return data[0].double() / 2, data[0].double() / 2\n", gpu_mode)
    assert wide.is_right and "float64, float64, the reference's float32, float32" in " ".join(wide.suspicious)
    wrong = verdict_of("def custom_kernel(data):\n    return data[0].half() / 2, data[0].half() / 2\n", gpu_mode)
    assert "the sum is wrong" in wrong.reason, "the format's rule has the candidate's dtypes"
    timed = verdict_of(SUBMISSIONS["wrong-when-timed"], gpu_mode, rounds=1)
    assert timed.rejected_as == "wrong-when-timed", "the rule is for timed calls, too"
    wrong = verdict_of(SUBMISSIONS["other-rule"], gpu_mode)
    assert wrong.rejected_as == "wrong-result" and "the sum is wrong" in wrong.reason
    signed = "def custom_kernel(data):\n    return data[0].abs() / 2, data[0] / 2\n"
    assert "random signs" in verdict_of(signed, gpu_mode).reason
    assert verdict_of(signed, gpu_mode, inputs_of_task_only=True).is_right, "the task has no negative inputs"


def test_a_precision_that_the_rule_accepts_is_right_for_larger_inputs(gpu_mode: Path) -> None:
    """The rule's absolute tolerance does not grow with the inputs, whose differences may be small."""
    text = (gpu_mode / "reference.py").read_text().replace("x / 2\n", "x - x.flip(-1)\n")
    text = text.replace("is_near(a + b, data[0])", "bool(((a - ref_kernel(data)[0]).abs() < 2e-2).all())")
    text = text.replace("torch.empty(rows, 8)", "torch.full((rows, 8), 2.0 ** (time.time_ns() % 200 - 100))")
    text = text.replace("import torch", "import time, torch  # the memory of a tensor for results may hold anything")
    (gpu_mode / "reference.py").write_text(text)
    right = verdict_of(SUBMISSIONS["rounded"], gpu_mode)
    assert right.is_right, right.reason
    assert "random signs" in verdict_of(SUBMISSIONS["rounded"].replace("data[0]", "data[0].abs()"), gpu_mode).reason


def test_a_saved_task_is_complete(gpu_mode: Path, tmp_path: Path) -> None:
    task = read_task(gpu_mode)
    saved = read_task(task.save(tmp_path / "saved"))
    assert saved.digest == task.digest and saved.name == task.name and saved.workloads == task.workloads
    assert saved.problem(saved.sizes()).get_inputs()[0][0].shape == (40, 8)
    assert {"split/task.yml", "split/utils.py", "split/reference.py"} == set(
        texts_of_task(gpu_mode)
    )  # for a leaderboard
    text = " ".join(task.description())
    assert "custom_kernel(data)" in text and "rows=40" in text and "check_implementation" in text


def test_a_task_that_needs_a_gpu_or_more_memory_exits_with_11(gpu_mode: Path, tmp_path: Path) -> None:
    submission = tmp_path / "submission.py"
    submission.write_text("def custom_kernel(data):\n    return data\n")
    reference = gpu_mode / "reference.py"
    text = reference.read_text()
    reference.write_text(text.replace("x, buffer = data", "raise torch.OutOfMemoryError('40 GiB')"))
    message = "needs more memory than is free: OutOfMemoryError: 40 GiB"
    expect(11, message, "judge", submission, "--task", gpu_mode, "--device", "cpu")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    reference.write_text(text.replace("torch.empty(rows, 8)", 'torch.empty(rows, 8, device="cuda")'))
    expect(11, "reference.py: generate_input needs a GPU", "judge", submission, "--task", gpu_mode)


@pytest.mark.parametrize("case", TEXTS["bad-gpu-mode"], ids=lambda case: case["message"])
def test_a_bad_gpu_mode_task_names_the_key(gpu_mode: Path, case: dict[str, str]) -> None:
    (gpu_mode / "submission.py").write_text("def custom_kernel(data):\n    return data\n")
    replace(gpu_mode / case["file"], case["old"], case["new"])
    with pytest.raises(ConfigError) as caught:
        task = read_task(gpu_mode)
        task.problem(task.sizes()).get_inputs()
        task.candidate_files(gpu_mode)
    assert case["message"] in f"{caught.value} ({caught.value.hint})"


def definition(directory: Path, workload: dict[str, Any], **changes: Any) -> Path:
    """Write a problem of SOL-ExecBench, or a data set of FlashInfer Trace for a workload with its name."""
    is_trace = "definition" in workload
    name = "definitions/test/halves.json" if is_trace else "definition.json"
    lines = "workloads/test/halves.jsonl" if is_trace else "workload.jsonl"
    write(directory, {name: json.dumps(DEFINITION | changes), lines: json.dumps(workload) + "\n"})
    return directory / name


def solution(directory: Path, language: dict[str, Any], name: str, text: str, **changes: Any) -> Path:
    spec = {"target_hardware": ["LOCAL"], "entry_point": f"{name}::run", **language}
    content = {"definition": "halves", "spec": spec, "sources": [{"path": name, "content": text}]}
    return write(directory, {"solution.json": json.dumps(content | changes)}) / "solution.json"


@pytest.mark.parametrize("peers", [("eager",), pytest.param(("eager", "compile"), marks=pytest.mark.nightly)])
def test_a_flashinfer_bench_solution_is_judged(peers: tuple[str, ...], tmp_path: Path) -> None:
    task = definition(tmp_path / "trace", {"definition": "halves", "workload": WORKLOAD})
    right = solution(tmp_path, {"language": "python"}, "main.py", DESTINATIONS.format(factor="factor"))
    judged = verdict(right, task, rounds=1, peers=peers)
    assert judged.is_right and "Error" not in str(judged.missing_peers)
    older = "def run(x, factor, **options):\n    return x[:, :4] * factor, x.sum(-1)\n"
    file = solution(tmp_path / "older", {"language": "Python", "entry_point": "run"}, "main.py", older)
    assert verdict(file, task).is_right, "neither a file nor destination_passing_style are named"
    package = {"halves/main.py": "from halves import parts\nrun = parts.run\n", "halves/parts.py": older}
    sources = [{"path": name, "content": text} for name, text in package.items()]
    spec = {"language": "triton", "destination_passing_style": False}
    file = solution(tmp_path / "package", spec, "halves/main.py", "", sources=sources)
    assert verdict(file, task).is_right
    (tmp_path / "file.py").write_text("def run(x, factor):\n    return x[:, :4] * factor, 1.02 * x.sum(-1)\n")
    wrong = verdict(tmp_path / "file.py", task)
    assert wrong.rejected_as == "wrong-result" and "output 'sum'" in wrong.reason


@pytest.fixture
def beside(tmp_path: Path) -> tuple[Path, Task]:
    """A directory with a solution whose source inner/k.py lies beside its file, and the task."""
    content = {"definition": "halves", "spec": {"entry_point": "run"}, "sources": [{"path": "inner/k.py"}]}
    own = write(tmp_path / "own", {"solution.json": json.dumps(content), "inner/k.py": "def run(x): return x\n"})
    return own, read_task(definition(tmp_path / "problem", WORKLOAD).parent)


def frozen_digest(candidate: Path, task: Task) -> str:
    with frozen(candidate) as copy:
        return read_candidate(copy, task).digest


def test_the_digest_has_the_sources_beside_a_solution(beside: tuple[Path, Task]) -> None:
    own, task = beside
    before = frozen_digest(own, task)
    (own / "inner/k.py").write_text("def run(x): return 2 * x\n")
    assert frozen_digest(own, task) != before


@pytest.mark.attack
@pytest.mark.parametrize(("source", "problem"), TEXTS["beside"], ids=["file named alone", "key", "link", "tool"])
def test_sources_beside_a_solution_are_files_of_its_own(beside: tuple[Path, Task], source: str, problem: str) -> None:
    """Others could be private files of the user, which the judge may read, or code that is in no digest."""
    own, task = beside
    text = (own / "solution.json").read_text().replace("inner/k.py", source)
    write(own, {"solution.json": text, ".ssh/key": "secret", "build/k.py": "def run(x): return x\n"})
    (own / "link.py").symlink_to(own.parent)
    with pytest.raises(ConfigError, match=problem):
        frozen_digest(own / "solution.json" if source == "inner/k.py" else own, task)


@pytest.mark.nightly  # Torch's headers take more than 10 s to compile
def test_a_sol_execbench_solution_in_cpp_is_built(tmp_path: Path) -> None:
    task = definition(tmp_path / "problem", WORKLOAD).parent
    found = verdict(solution(tmp_path, {"languages": ["cuda_cpp"]}, "main.cpp", CPP), task)
    assert found.is_right, found.reason


def test_a_sol_execbench_solution_is_judged(tmp_path: Path) -> None:
    task = definition(tmp_path / "problem", WORKLOAD).parent
    wrong = solution(tmp_path, {"languages": ["pytorch"]}, "main.py", DESTINATIONS.format(factor=2.0))
    assert "wrong" not in verdict(wrong, task).verdict, "the factor is always 2"
    wrong = solution(tmp_path, {"languages": ["pytorch"]}, "main.py", DESTINATIONS.format(factor=2.1))
    assert verdict(wrong, task).rejected_as == "wrong-result"


def test_a_backend_bench_kernel_is_judged(tmp_path: Path) -> None:
    write(tmp_path, TEXTS["trace"])
    task = tmp_path / "trace.txt::aten.add.Tensor"
    kernel = "def add__Tensor_kernel_impl(a, b, *, alpha=1):\n    return a + {}b\n"
    write(tmp_path / "kernels", {"add__Tensor/add__Tensor_implementation_v1.py": kernel.format("alpha * ")})
    assert verdict(tmp_path / "kernels", task).is_right
    write(tmp_path, {"wrong.py": kernel.format("")})
    assert verdict(tmp_path / "wrong.py", task).rejected_as == "wrong-result"
    with pytest.raises(ConfigError, match=r"expected one of aten.add.Tensor, aten.relu.default"):
        read_task(tmp_path / "trace.txt")


@pytest.mark.attack
@pytest.mark.parametrize(("operator", "arguments", "problem"), TEXTS["trace-code"])
def test_a_trace_runs_no_code(tmp_path: Path, operator: str, arguments: str, problem: str) -> None:
    made = tmp_path / "made"
    write(tmp_path, {"trace.txt": f"Operator: aten.{operator}\ncnt: 1, {arguments.format(made)}\n"})
    with pytest.raises(ConfigError, match=problem):
        task = read_task(tmp_path / "trace.txt")
        task.problem(task.sizes()).get_inputs()
    assert not made.exists()


def test_the_tolerance_is_the_formats(tmp_path: Path) -> None:
    loose = {"max_atol": 0.5, "max_rtol": 0.0, "required_matched_ratio": 0.7, "max_error_cap": 2}
    task = read_task(definition(tmp_path / "a", WORKLOAD | {"tolerance": loose}).parent)
    fault = task.problem(task.sizes()).fault
    assert fault
    expected = [torch.ones(5, 4), torch.ones(5)]
    off = torch.tensor([1.0, 1.4, 0.6, 1.2, 2.9])
    assert fault((), [expected[0], off], expected) is None
    assert "max_error_cap" in str(fault((), [expected[0], off + torch.tensor([0, 0, 0, 0, 1.0])], expected))
    assert "60.00%" in str(fault((), [expected[0], off + torch.tensor([0, 0.2, 0, 0, 0])], expected))
    assert "are 0" in str(fault((), [expected[0] * 0, off], expected))
    strict = read_task(definition(tmp_path / "b", {"definition": "halves", "workload": WORKLOAD}))
    fault = strict.problem(strict.sizes()).fault
    assert fault and "80.00%" in str(fault((), [expected[0], torch.tensor([1.0, 1, 1, 1, 1.03])], expected))


def test_inputs_are_those_of_the_workload(tmp_path: Path) -> None:
    made = "\n\ndef make(axes, device):\n    return {'x': torch.full((axes['rows'], 8), 3.0)}\n"
    own = WORKLOAD | {"inputs": {"x": {"type": "custom"}, "factor": {"type": "scalar", "value": 2.0}}}
    changes = {"reference": f"import torch\n{DEFINITION['reference']}{made}", "custom_inputs_entrypoint": "make"}
    task = read_task(definition(tmp_path / "a", own, **changes).parent)
    assert bool((task.problem(task.sizes()).get_inputs()[0] == 3).all())
    stored = {"x": {"type": "safetensors", "tensor_key": "k"}, "factor": own["inputs"]["factor"]}
    (tmp_path / "b" / "blob").mkdir(parents=True)
    with (tmp_path / "b" / "blob" / "x.safetensors").open("wb") as blob:
        blob.write(LFS_POINTER)
        blob.truncate(1 << 43)  # is not read to its end
    for path in ("/etc/hostname", "blob/../../a/definition.json", "blob/x.safetensors"):
        stored["x"]["path"] = path
        file = definition(tmp_path / "b", {"definition": "halves", "workload": WORKLOAD | {"inputs": stored}})
        task = read_task(file)
        with pytest.raises(ConfigError, match=rf"inputs\.x\.path of a workload: {path} is not in"):
            task.problem(task.sizes()).get_inputs()
    safetensors.torch.save_file({"k": torch.full((5, 8), 4.0)}, tmp_path / "b" / "blob" / "x.safetensors")
    saved = read_task(task.save(tmp_path / "saved"))
    assert bool((saved.problem(saved.sizes()).get_inputs()[0] == 4).all())


@pytest.mark.parametrize("case", TEXTS["bad-definition"], ids=lambda case: case["message"])
def test_a_bad_definition_names_the_key(tmp_path: Path, case: dict[str, str]) -> None:
    file = definition(tmp_path, WORKLOAD, **json.loads(case["changes"]))
    with pytest.raises(ConfigError) as caught:
        task = read_task(file.parent)
        task.problem(task.sizes())
    assert case["message"] in str(caught.value)


@pytest.mark.parametrize("case", TEXTS["bad-solution"], ids=lambda case: case["message"])
def test_a_bad_solution_names_the_key(tmp_path: Path, case: dict[str, str]) -> None:
    task = read_task(definition(tmp_path / "a", WORKLOAD).parent)
    file = solution(tmp_path, {"languages": ["pytorch"]}, "main.py", DESTINATIONS, **json.loads(case["changes"]))
    file.write_text(file.read_text().replace("{}", "[" * 100_000))
    with pytest.raises(ConfigError) as caught:
        task.candidate_files(file)
    assert case["message"] in str(caught.value)
