"""The files that `torch.compile` makes once on a machine, and that all workers read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from judge_samples import HONEST, quick

from kernel_builder import sandbox
from kernel_builder.progress import Silent
from kernel_judge.judge import compiler_cache, observed_reference
from kernel_judge.judge.compiler_cache import prepared
from kernel_judge.judge.judgement import judge
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess

# Tries to change each file that it was lent, and names those that it could change.
WRITES = """
from pathlib import Path
import torch

changed = []
for file in Path.cwd().glob("torchinductor_judge/**/*"):
    try:
        if file.is_file():
            file.resolve().chmod(0o644)
            file.write_text("changed")
            changed.append(file.name)
    except OSError:
        pass
raise RuntimeError(f"changed {changed}, lent {len(list(Path.cwd().glob('torchinductor_judge/**/*.gch')))}")
"""


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.slow
def test_torch_compile_is_prepared_once_and_no_candidate_can_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def worker(lent: Path | None = None) -> WorkerProcess:
        started.append(lent)
        return WorkerProcess(sandbox.strongest(), "cpu", lent=lent)

    made = prepared(tmp_path, worker, Silent())
    assert made is not None and len(started) == 2  # eager's and torch.compile's
    assert list(made.rglob("*.gch")) and list(made.rglob("*.so"))
    assert not list(made.rglob("*.py")), "code of a model"
    before = {file: file.read_bytes() for file in made.rglob("*") if file.is_file()}
    assert prepared(tmp_path, worker, Silent()) == made and len(started) == 2
    assert [path.name for path in made.parent.iterdir() if path.name.startswith("new-")] == []

    with worker(made) as candidate:
        source = candidate.scratch / "candidate.py"
        source.write_text(WRITES)
        candidate.ready(120)
        with pytest.raises(WorkerFailure, match=r"changed \[\], lent 1"):
            candidate.ask("load", str(source), "ModelNew", seconds=60)
    assert {file: file.read_bytes() for file in made.rglob("*") if file.is_file()} == before

    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(tmp_path))
    said = Said()
    file = next(file for file in HONEST if file.stem == "other_strides")
    verdict = judge(quick(file, rounds=1, peers=("eager", "compile"), compile_seconds=120.0), said)
    assert set(verdict.speed) == {"eager", "compile"}, said.lines
    assert not [line for line in said.lines if "prepar" in line and "torch.compile" in line]


def test_the_code_of_a_reference_is_generated_with_what_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_file = tmp_path / "prepared" / "precompiled_headers" / "header.h.gch"
    prepared_file.parent.mkdir(parents=True)
    prepared_file.write_text("a header")
    seen = []

    def run(command: list[str], env: dict[str, str], check: bool) -> None:
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        seen.append((cache / "precompiled_headers" / "header.h.gch").read_text())
        Path(env["TORCH_LOGS_OUT"]).write_text("V1 [0/0] [__output_code] import torch\n")

    monkeypatch.setattr(compiler_cache, "existing", lambda root: tmp_path / "prepared")
    monkeypatch.setattr(subprocess, "run", run)
    observed_reference._save_code(tmp_path / "task.py", tmp_path)
    assert seen == ["a header"]
    assert (tmp_path / "compiled.py").read_text() == "import torch\n"
