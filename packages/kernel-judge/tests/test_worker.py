"""The judge's hold on a worker's processes and clock."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_builder import toml_file
from kernel_judge.judge import worker_process
from kernel_judge.judge.process_tree import descendants
from kernel_judge.judge.speed import reported_seconds
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess
from kernel_sandbox import sandbox
from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK, PROCESS
from tests.support.inside_attacks import METADATA, OWN_FILE, SECRETS
from tests.support.outside import Outside
from tests.support.programs import wait_for

pytestmark = pytest.mark.attack

CANDIDATES = toml_file.read(Path(__file__).with_name("worker_candidates.toml"))


@contextmanager
def worker_of(
    directory: Path, text: str, kind: str, *, readable: Sequence[Path] = (), **options: Any
) -> Iterator[WorkerProcess]:
    """A worker that is ready, with a candidate in `candidate.py` of the directory."""
    (directory / "candidate.py").write_text(text)
    with WorkerProcess(kind, "cpu", readable=[directory, *readable], **options) as worker:
        worker.ready(120)
        yield worker


def load(worker: WorkerProcess, directory: Path, seconds: float = 120) -> None:
    worker.ask("load", str(directory / "candidate.py"), "ModelNew", seconds=seconds)


def test_an_answer_that_never_ends_has_a_deadline(tmp_path: Path) -> None:
    with worker_of(tmp_path, CANDIDATES["drips"], PROCESS) as worker, pytest.raises(WorkerFailure) as failed:
        load(worker, tmp_path, 1)
    assert failed.value.kind == "timeout"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [LANDLOCK, PROCESS, sandbox.strongest()])
def test_a_worker_that_is_starting_ends_with_its_judgement(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_GUARD_SECONDS", 10_000)
    with WorkerProcess(kind, "cpu") as worker:
        pass
    assert worker.process.returncode


@pytest.fixture(params=[LANDLOCK, PROCESS, BUBBLEWRAP, "docker"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sandbox; Landlock also without namespaces."""
    if request.param == BUBBLEWRAP and sandbox.strongest() != BUBBLEWRAP:
        pytest.skip("bubblewrap is not installed, or may not be used")
    if request.param == "docker":
        monkeypatch.setattr(sandbox, "prefix", lambda *_: [sys.executable, "-c", CANDIDATES["without-namespaces"]])
        return LANDLOCK
    return str(request.param)


def test_a_process_that_has_left_the_workers_group_is_suspended_too(kind: str, tmp_path: Path) -> None:
    with worker_of(tmp_path, CANDIDATES["writes"], kind) as worker:
        written = worker.scratch / "written"

        def grows_within(seconds: float) -> bool:
            before = written.stat().st_size
            return wait_for(lambda: written.stat().st_size > before, seconds)

        load(worker, tmp_path)
        assert wait_for(written.exists)
        worker.stop()
        assert not grows_within(0.2)
        worker.ask("patched", seconds=120)
        assert grows_within(60), "a command resumes all of them"
        processes = descendants(worker.process.pid)
    assert not processes & {*psutil.pids()}, "all end with the worker"


@pytest.mark.parametrize("kind", [LANDLOCK, PROCESS])
def test_a_suspended_process_ends_with_a_killed_judge(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", CANDIDATES["judge"], kind], stdout=subprocess.PIPE) as judge:
        assert judge.stdout and judge.stdout.readline()
        left = descendants(judge.pid)
        judge.kill()

    def have_ended() -> bool:
        states = {process.pid: process.info["status"] for process in psutil.process_iter(["status"])}
        return {states.get(process, psutil.STATUS_ZOMBIE) for process in left} <= {psutil.STATUS_ZOMBIE}

    assert wait_for(have_ended, 30)


@pytest.mark.parametrize("waking", CANDIDATES["waking"])
def test_a_process_that_something_wakes_while_it_is_suspended_is_noticed(waking: str, tmp_path: Path) -> None:
    with worker_of(tmp_path, CANDIDATES["timer"] + CANDIDATES["waking"][waking], sandbox.strongest()) as worker:
        load(worker, tmp_path)
        written = worker.scratch / "written"
        assert wait_for(written.exists)
        worker.stop()
        suspended = written.stat().st_size
        wait_for(lambda: written.stat().st_size >= suspended + 100, 20)
        with pytest.raises(WorkerFailure, match="while the judge had suspended them") as caught:
            worker.timed("patched", seconds=120)
    assert caught.value.kind == "ran-while-suspended"


def test_an_honest_process_is_suspended_without_cpu_time(tmp_path: Path) -> None:
    with worker_of(tmp_path, CANDIDATES["writes"], sandbox.strongest(), threads=2) as worker:
        load(worker, tmp_path)
        for _ in range(20):
            worker.stop()
            time.sleep(0.02)
            assert worker.timed("patched", seconds=120)[1] is None


def test_what_is_no_time_agrees_with_no_clock() -> None:
    assert reported_seconds(0.02) == 0.02
    assert [reported_seconds(answer) for answer in (math.nan, -math.inf, "0.02", None, 10**400)] == [math.inf] * 5


MODEL = "import ctypes, os, socket, time\nimport torch\n\nclass ModelNew(torch.nn.Module):\n    pass\n\n"


@pytest.mark.parametrize("name", CANDIDATES["exhausting"])
def test_a_candidate_cannot_exhaust_the_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exhausting = CANDIDATES["exhausting"][name]
    monkeypatch.setattr(worker_process, "MOST_MEMORY", 1 << 30)
    monkeypatch.setattr(worker_process, "MOST_DISK", 200 << 20)
    monkeypatch.setattr(worker_process, "MOST_PROCESSES", 40)
    with worker_of(tmp_path, f"{MODEL}{exhausting['statements']}\n", sandbox.strongest()) as worker:
        with pytest.raises(WorkerFailure, match=exhausting["message"]) as caught:
            load(worker, tmp_path)
        assert worker.inputs.raw(1).clone().numel() == 1, "the judge can read its memory"
    assert caught.value.kind == exhausting["kind"]


def test_a_candidate_reaches_nothing_of_the_machine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sandbox of the kernel's, that is no more than its sockets and terminals."""
    for name in SECRETS:
        monkeypatch.setenv(name, "x")
    with Outside() as outside:
        tries = f"raise OSError(*inside_attacks.succeeded({outside.targets!r}), *{SECRETS!r} & {{*os.environ}})\n"
        text = f"import os\nimport sys\nsys.path.append({str(outside.directory)!r})\nimport inside_attacks\n{tries}"
        worker = worker_of(tmp_path, text, kind, readable=[outside.directory])
        with worker as ready, pytest.raises(WorkerFailure) as caught:
            load(ready, tmp_path)
        reached = outside.real(re.findall(r"'([\w-]+)'", str(caught.value)))
    assert OWN_FILE in reached
    files = METADATA | {"read", "write", "truncate", "open-truncate", "rename", "directory", "pipe", "home"}
    files |= {"command-line", "memory-order", "kernel-setting", "device", "other-terminal"}  # in /proc and /dev
    files |= {"kernel-pressure", "passwords"}
    assert reached - {OWN_FILE} <= (files if kind == PROCESS else set())
