"""`kernel-builder benchmark` on real builds of correct and wrong kernels."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from kernel_builder.cli import main
from kernel_builder.measure.results import COPY, OURS, YARDSTICK, BenchmarkReport, Point
from tests.conftest import CPU, ROOT
from tests.e2e.conftest import BUILDER, Run

RIGHT = "out[i] = factor * in[i]"
MEASURED = ("--dtype", "float32", "--rounds", "7")


@pytest.fixture
def scale(
    copy_project: Callable[..., Path], new_cache: Callable[[str], Path], kernel_builder: Run
) -> Callable[..., Path]:
    """Builds `stable-scale` with workloads; `statement` replaces the kernel's only statement."""

    def make(statement: str = RIGHT) -> Path:
        project = copy_project("stable-scale")
        source = project / "scale" / "scale_cpu.cpp"
        assert RIGHT in source.read_text()
        source.write_text(source.read_text().replace(RIGHT, statement))
        (project / "benchmarks").mkdir()
        shutil.copy(ROOT / "kernels" / "kit" / "workload.py", project / "benchmarks")
        shutil.copy(ROOT / "tests" / "measure" / "scale_benchmark.py", project / "benchmarks" / "benchmark.py")
        done = kernel_builder(new_cache("cache"), "build", project, "--variant", CPU, "--no-load")
        assert done.code == 0, done.stderr
        return project

    return make


def benchmark(*arguments: str | Path) -> Result:
    """Runs the command in this process, which has imported Torch already."""
    done = CliRunner().invoke(main, ["benchmark", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def test_a_kernel_is_measured(scale: Callable[..., Path], tmp_path: Path) -> None:
    project, file, picture = scale(), tmp_path / "scale.json", tmp_path / "scale.svg"
    command = [str(BUILDER), "benchmark", str(project), *MEASURED, "--against", "eager,mul,absent,another"]
    command += ["--json", str(file), "--plot", str(picture)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = BenchmarkReport.read(file)
    assert report.variant == CPU and report.kernel == "stable-scale"
    assert report.command == shlex.join(["kernel-builder", *command[1:]])
    assert [row.point for row in report.rows] == [
        Point("scaled", "forward", shape, "float32") for shape in ((64, 512), (128, 512))
    ]
    for row in report.rows:
        elements = row.point.shape[0] * row.point.shape[1]
        assert row.bytes == 2 * 4 * elements
        # A peer with a wrong result gets no time either.
        assert row.times.keys() == {COPY, OURS, "eager", "mul"}
        assert row.faults.keys() == {"another"}
        assert all(0 < one.low <= one.median <= one.high < 1 for one in row.times.values())
        assert row.shares[COPY].median == row.ratios[OURS].median == 1
    assert report.absent.keys() == {"absent"}
    (host,) = report.hosts
    assert host.point.shape == (1, 8) and host.times.keys() == {OURS, YARDSTICK, "eager", "mul", "another"}
    # The printed report has the same rows, and so has one printed from the file.
    for shown in (done.stdout, benchmark("--from", file).stdout):
        assert "64x512" in shown and "128x512" in shown and "WRONG" not in shown
        assert "absent: ModuleNotFoundError" in shown
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.mark.slow
def test_device_times_and_host_overhead_can_be_measured_alone(scale: Callable[..., Path], tmp_path: Path) -> None:
    project, file = scale(), tmp_path / "scale.json"
    options = [*MEASURED, "--against", "eager", "--shapes", "64x512", "--json", file]
    for only, rows, hosts in (("device", 1, 0), ("host", 0, 1)):
        done = benchmark(project, *options, "--only", only)
        assert done.exit_code == 0, done.output
        report = BenchmarkReport.read(file)
        assert (len(report.rows), len(report.hosts)) == (rows, hosts)
        assert ("geometric means" in done.output, "host overhead" in done.output) == (bool(rows), bool(hosts))


def test_torch_compile_is_a_peer(scale: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    file = tmp_path / "scale.json"
    done = benchmark(scale(), *MEASURED, "--against", "compile", "--jobs", "2", "--json", file, "--shapes", "64x512")
    assert done.exit_code == 0, done.stderr
    assert "[2/2] compiling peers" in done.stderr
    assert list((tmp_path / "inductor").iterdir())
    assert [row.times.keys() for row in BenchmarkReport.read(file).rows] == [{COPY, OURS, "compile"}]


@pytest.mark.parametrize(
    "statement",
    [
        "out[i] = i % 1000 ? factor * in[i] : 0",  # now and then
        "out[i] = (float)(int)(1e5f * factor * in[i]) * 1e-5f",  # too roughly, everywhere
        "out[i] = i % 1000 ? factor * in[i] : 0.f / 0.f * in[i]",  # not a number
    ],
)
def test_a_wrong_kernel_gets_no_time(scale: Callable[..., Path], tmp_path: Path, statement: str) -> None:
    project, file = scale(statement), tmp_path / "scale.json"
    done = benchmark(project, *MEASURED, "--against", "eager", "--json", file, "--shapes", "64x512")
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("64x512"))
    assert "WRONG" in line and " us" not in line
    (row,) = BenchmarkReport.read(file).rows
    assert not row.times and row.faults.keys() == {OURS}
    assert json.loads(file.read_text())["rows"][0]["times"] == {}


def test_bad_selections_have_clear_errors(
    scale: Callable[..., Path], copy_project: Callable[..., Path], tmp_path: Path
) -> None:
    project = scale()
    for arguments, words in {
        ("--shapes", "64x512,7by9"): "--shapes: '7by9' is not a shape; expected sizes joined by x",
        ("--shapes", "*x3"): "--shapes: '*x3' fits no operation on cpu; they take 2 sizes, and declare 64x512, 128x512",
        ("--shapes", "1x2x3"): "--shapes: '1x2x3' fits no operation on cpu",
        ("--against", "eager,nobody"): "--against: 'nobody' is none of eager, mul, absent, another, compile",
        ("--operation", "scale"): "--operation: 'scale' is none of scaled",
        ("--pass", "backward"): "nothing is declared for backward on cpu",
    }.items():
        done = benchmark(project, *arguments)
        assert done.exit_code == 2 and words in done.stderr, done.stderr
    unbuilt = copy_project("stable-scale", "unbuilt")
    assert "benchmark.py: does not exist" in benchmark(unbuilt).stderr
    shutil.copytree(project / "benchmarks", unbuilt / "benchmarks")
    done = benchmark(unbuilt)
    assert done.exit_code == 3 and f"hint: kernel-builder build {unbuilt} --backend cpu" in done.stderr
