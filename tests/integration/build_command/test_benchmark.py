"""`kernel-builder benchmark` on real builds of correct and wrong kernels."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.measure.results import COPY, OURS, YARDSTICK, BenchmarkReport, Point
from tests.integration.build_command.conftest import BUILDER, FOR_CPU, MEASURED, RIGHT, Copy, Run
from tests.support.cli import expect
from tests.support.files import replace
from tests.support.places import CPU
from tests.support.programs import run


def test_a_kernel_is_measured(scale: Callable[..., Path], tmp_path: Path) -> None:
    project, file = scale(), tmp_path / "scale.json"
    command = [str(BUILDER), "benchmark", str(project), *MEASURED, "--against", "eager,mul,absent,another"]
    command += ["--json", str(file)]
    printed = run(*command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    report = BenchmarkReport.read(file)
    assert report.variant == CPU and report.kernel == "stable-scale"
    assert report.command == shlex.join(["kernel-builder", *command[1:]])
    assert [row.point for row in report.rows] == [
        Point("scaled", "forward", shape, "float32") for shape in ((64, 512), (128, 512))
    ]
    for row in report.rows:
        assert row.bytes == 2 * 4 * (row.point.shape[0] * row.point.shape[1])
        # A peer with a wrong result is not timed either.
        assert row.times.keys() == {COPY, OURS, "eager", "mul"}
        assert row.faults.keys() == {"another"}
        assert all(0 < interval.low <= interval.median <= interval.high < 1 for interval in row.times.values())
        assert row.shares[COPY].median == row.ratios[OURS].median == 1
    assert report.absent.keys() == {"absent"}
    (host,) = report.hosts
    assert host.point.shape == (1, 8) and host.times.keys() == {OURS, YARDSTICK, "eager", "mul", "another"}
    assert "64x512" in printed and "128x512" in printed and "WRONG" not in printed
    assert "absent: ModuleNotFoundError" in printed


def test_the_naive_kernel_is_the_first_peer_of_forward_passes(
    scale: Callable[..., Path], copy_project: Copy, shared_cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    project, file = scale(), tmp_path / "scale.json"
    for old, new in {
        'SHAPES = {"forward": ': 'SHAPES = {"forward + backward": {"cuda": [], "cpu": [(64, 512)]}, "forward": ',
        "return self.kernel.scaled(x, 3.0)": "return x * 3.0  # with a gradient\n\n"
        "    def naive(self, x):\n        return self.naive_kernel.scaled(x, 3.0)",
    }.items():
        replace(project / "benchmarks" / "benchmark.py", old, new)
    copy_project("stable-scale", "naive").rename(project / "naive")
    replace(project / "naive" / "scale" / "scale_cpu.cpp", RIGHT, "out[i] = in[i] * factor")
    kernel_builder.build(project / "naive", *FOR_CPU, cache=shared_cache)
    arguments = (project, *MEASURED, "--against", "naive,eager", "--shapes", "64x512", "--json", file)
    expect(0, "", "benchmark", *arguments)
    report = BenchmarkReport.read(file)
    with_gradients, forward = report.rows
    assert list(forward.times) == [COPY, OURS, "naive", "eager"]
    assert list(with_gradients.times) == [COPY, OURS, "eager"] and not with_gradients.faults
    assert "naive" in report.hosts[1].times and "naive" not in report.hosts[0].times


def test_a_wrong_kernel_is_not_timed(scale: Callable[..., Path], tmp_path: Path) -> None:
    project, file = scale("out[i] = i % 1000 ? factor * in[i] : 0"), tmp_path / "scale.json"
    done = expect(1, "", "benchmark", project, *MEASURED, "--against", "eager", "--json", file, "--shapes", "64x512")
    line = next(line for line in done.stdout.splitlines() if line.startswith("64x512"))
    assert "WRONG" in line and " us" not in line
    (row,) = BenchmarkReport.read(file).rows
    assert not row.times and row.faults.keys() == {OURS}


def test_bad_selections_have_clear_errors(
    scale: Callable[..., Path], copy_project: Callable[..., Path], tmp_path: Path
) -> None:
    project = scale()
    for arguments, message in {
        ("--shapes", "64x512,7by9"): "--shapes: '7by9' is not a shape; expected sizes joined by x",
        ("--shapes", "*x3"): "--shapes: '*x3' fits no operation on cpu; they declare 64x512, 128x512",
        ("--shapes", "1x2x3"): "--shapes: '1x2x3' fits no operation on cpu",
        ("--against", "eager,unknown"): "--against: 'unknown' is none of eager, mul, absent, another, compile",
        ("--operation", "scale"): "--operation: 'scale' is none of scaled",
    }.items():
        expect(2, message, "benchmark", project, *arguments)
    unbuilt = copy_project("stable-scale", "unbuilt")
    expect(2, "benchmark.py: does not exist", "benchmark", unbuilt)
    shutil.copytree(project / "benchmarks", unbuilt / "benchmarks")
    expect(3, f"hint: kernel-builder build {unbuilt} --backend cpu", "benchmark", unbuilt)
    replace(unbuilt / "build.toml", 'backends = ["cpu", "cuda"]', 'backends = ["cuda"]')
    declared = (unbuilt / "build.toml").read_text()
    (unbuilt / "build.toml").write_text(re.sub(r"\[kernel.scale_cpu\][^\[]*\n\n", "", declared))
    expect(3, "hint: the project has cuda only: measure on such a machine", "benchmark", unbuilt)


@pytest.mark.nightly  # Inductor takes 9 s of CPU time
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
    done = expect(0, "", "benchmark", project, *options, "--json", file)
    assert "[0/1] compiling peers\n[1/1] compiling peers" in done.stderr
    assert list((tmp_path / "inductor").iterdir())
    assert [row.times.keys() for row in BenchmarkReport.read(file).rows] == [{COPY, OURS, "compile"}]
