"""Workloads of projects, as `kernel-builder benchmark` and the public runner read them, and their selection."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cli.benchmark import discover_benchmark_classes

from kernel_builder import toml_file
from kernel_builder.measure.case import Case, tensors
from kernel_builder.measure.workloads import load, make, points
from kernel_format.errors import ConfigError
from tests.support.places import ROOT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = sorted(path.parents[1] for path in (ROOT / "kernels").glob("*/benchmarks/benchmark.py"))


def project(directory: Path, source: str) -> Path:
    (directory / "benchmarks").mkdir()
    shutil.copy(ROOT / "kernels" / "kit" / "workload.py", directory / "benchmarks")
    (directory / "benchmarks" / "benchmark.py").write_text(source)
    return directory


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_every_kernel_declares_what_both_runners_find(kernel: Path) -> None:
    workloads = load(kernel)
    public = discover_benchmark_classes(kernel / "benchmarks" / "benchmark.py", kernel)
    assert sorted(cls.__name__ for cls in public) == sorted(cls.__name__ for cls in workloads.values())
    for cls in public:
        methods = [name for name in dir(cls) if name.startswith("benchmark_")]
        assert len(methods) == sum(len(shapes[DEVICE]) for shapes in cls.shapes.values())
        for name in methods:
            assert callable(getattr(cls, name.replace("benchmark_", "setup_")))
            assert callable(getattr(cls, name.replace("benchmark_", "verify_")))
    for cls in workloads.values():
        for shapes in cls.shapes.values():
            assert {len(shape) for device in shapes.values() for shape in device} == {len(cls.small)}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_eager_code_in_float64_is_the_reference(kernel: Path) -> None:
    for cls in load(kernel).values():
        for passes in cls.shapes:
            case = Case(make(cls, None, "cpu", "float32"), passes, cls.small)
            case.prepare(tensors(case.workload.eager(*case.inputs)))
            results, exact = case.results(case.workload.eager), case.exact()
            assert len(results) == len(exact)
            for result, wanted in zip(results, exact, strict=True):
                assert wanted.dtype == torch.float64
                torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-4)
                assert not torch.equal(result.double(), wanted) or torch.equal(wanted.float().double(), wanted)


@pytest.mark.parametrize("case", toml_file.read(Path(__file__).with_name("bad_workloads.toml"))["case"])
def test_errors_name_the_class(case: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=case["message"]):
        load(project(tmp_path, case["source"]))


def test_bytes_count_each_tensor_once() -> None:
    """Forward: x, weight and result. Backward: x and weight again, and the gradients of result, x and weight."""
    norm = load(ROOT / "kernels" / "rmsnorm")["rms_norm"]
    x, weight = 2 * 4 * 1024, 2 * 1024
    moved = {}
    for passes in ("forward", "backward", "forward + backward"):
        case = Case(make(norm, None, "cpu", "bfloat16"), passes, (1, 4, 1024))
        case.prepare(tensors(case.workload.eager(*case.inputs)))
        moved[passes] = case.moved(case.results(case.workload.eager))
    assert moved["forward"] == 2 * x + weight
    assert moved["backward"] == 3 * x + 2 * weight
    assert moved["forward + backward"] == 5 * x + 3 * weight


class Norm:
    small = (1, 8)
    shapes = {  # noqa: RUF012
        "forward": {"cuda": [(4, 2048), (8, 2048), (8, 128)], "cpu": [(4, 64)]},
        "backward": {"cuda": [(8, 2048)], "cpu": []},
    }


class Rope:
    small = (1, 1, 1)
    shapes = {"forward": {"cuda": [(1, 2, 3)], "cpu": [(1, 2, 3)]}}  # noqa: RUF012


ALL: dict[str, type[Any]] = {"norm": Norm, "rope": Rope}
DECLARED = ["forward 4x2048", "forward 8x2048", "forward 8x128", "backward 8x2048", "forward 1x2x3"]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], DECLARED),
        (["4x*"], ["forward 4x2048"]),
        (["8x128", "8x*"], ["forward 8x128", "forward 8x2048", "backward 8x128", "backward 8x2048"]),
        (["5x7"], ["forward 5x7", "backward 5x7"]),
        (["9x9x9"], ["forward 9x9x9"]),
    ],
)
def test_patterns_select_declared_shapes_and_shapes_stand_for_themselves(
    shapes: list[str], expected: list[str]
) -> None:
    selected = points(ALL, "cuda", shapes=shapes, dtypes=("float32", "float16"))
    for dtype in ("float32", "float16"):
        names = [str(point).split(", ") for point in selected if point.dtype == dtype]
        assert [f"{passes} {shape}" for _, passes, _, shape in names] == expected


def test_a_device_without_shapes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shape is declared for xpu"):
        points({"rope": Rope}, "xpu")
