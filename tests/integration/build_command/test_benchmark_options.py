"""`kernel-builder benchmark`: options that choose peers and measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.measure.results import COPY, OURS, BenchmarkReport
from tests.integration.build_command.conftest import MEASURED, benchmark


def test_torch_compile_is_a_peer(scale: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Every process would compile programs to learn which vector instructions the compiler supports.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Precompiled headers take longer than the one program that would use them.
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    file = tmp_path / "a directory to make" / "scale.json"
    # One program: each takes a process with Torch and its compiler, and g++ with Torch's headers.
    options = [*MEASURED, "--against", "compile", "--shapes", "64x512", "--only", "device"]
    done = benchmark(scale(), *options, "--json", file)
    assert done.exit_code == 0, done.stderr
    assert "[1/1] compiling peers" in done.stderr
    assert list((tmp_path / "inductor").iterdir())
    assert [row.times.keys() for row in BenchmarkReport.read(file).rows] == [{COPY, OURS, "compile"}]
