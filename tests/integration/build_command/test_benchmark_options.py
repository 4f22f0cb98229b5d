"""`kernel-builder benchmark`: options that choose peers and measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.measure.results import COPY, OURS, BenchmarkReport
from tests.integration.build_command.conftest import MEASURED, benchmark, replace


def test_torch_compile_is_a_peer(scale: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Every process would compile programs to learn which vector instructions the compiler supports.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    file = tmp_path / "a directory to make" / "scale.json"
    project = scale()
    # A matrix product is a call of a library: Inductor compiles no C++ for it.
    declared = project / "benchmarks" / "benchmark.py"
    replace(declared, "PEERS = {", "DIAGONAL = 3.0 * torch.eye(512)\nPEERS = {")
    replace(declared, "return 3.0 * x", "return torch.mm(x, DIAGONAL.to(x.dtype))")
    options = [*MEASURED, "--against", "compile", "--shapes", "64x512", "--only", "device"]
    done = benchmark(project, *options, "--json", file)
    assert done.exit_code == 0, done.stderr
    assert "[1/1] compiling peers" in done.stderr
    assert list((tmp_path / "inductor").iterdir())
    assert [row.times.keys() for row in BenchmarkReport.read(file).rows] == [{COPY, OURS, "compile"}]
