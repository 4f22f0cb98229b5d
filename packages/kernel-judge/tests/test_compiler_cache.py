"""The files that `torch.compile` makes once on a machine, and that all workers read."""

from __future__ import annotations

from pathlib import Path

import pytest
from judge_samples import HERE, quick
from searches import quick_request, quoted, run_search

from kernel_judge.judge.compiler_cache import existing, prepared
from kernel_judge.judge.judgement import judge
from kernel_judge.judge.worker_process import WorkerProcess
from kernel_sandbox import sandbox

# Right only if it is lent precompiled headers and cannot change any file that it is lent.
WRITES = """
from pathlib import Path
import torch

lent = [file for file in Path.cwd().glob("torchinductor_judge/**/*") if file.is_file()]
assert any(file.suffix == ".gch" for file in lent)
for file in lent:
    try:
        file.resolve().chmod(0o644)
        file.write_text("changed")
    except OSError:
        continue
    raise AssertionError(f"changed {file.name}")


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return 3.0 * x
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the builder in which `torch.compile` is prepared, once."""
    root, started = tmp_path_factory.mktemp("cache"), []

    def worker() -> WorkerProcess:
        started.append(True)
        return WorkerProcess(sandbox.strongest(), "cpu")

    made = prepared(root, worker, print)
    assert made is not None and len(started) == 1
    assert list(made.rglob("*.gch")) and list(made.rglob("*.so"))
    assert not list(made.rglob("*.py")), "code of a model"
    assert prepared(root, worker, print) == made == existing(root) and len(started) == 1
    assert [path.name for path in made.parent.iterdir() if path.name.startswith("new-")] == []
    return root


@pytest.mark.slow
def test_torch_compile_is_prepared_once_and_no_candidate_can_change_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(cache))
    messages: list[str] = []
    candidate = tmp_path / "candidate.py"
    candidate.write_text(WRITES)
    task = HERE / "tasks" / "scaled.py"
    verdict = judge(
        quick(candidate, task=task, rounds=1, peers=("eager", "compile"), compile_seconds=120.0), messages.append
    )
    assert verdict.is_right, verdict.reason
    assert set(verdict.speed) == {"eager", "compile"}, messages
    assert not [line for line in messages if "prepar" in line and "torch.compile" in line]
    assert {file: content for file, content in before.items() if file.read_bytes() != content} == {}


@pytest.mark.slow
def test_the_reference_is_the_generated_code_where_no_file_is_named(
    cache: Path, judge_calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(cache))
    request = quick_request(tmp_path, quoted("# wrong"), contexts=(("reference",),))
    code = run_search(request).run / "given/context/reference/compiled.py"
    assert "clamp" in code.read_text() and "__output_code" not in code.read_text()
    assert judge_calls.read_text()
