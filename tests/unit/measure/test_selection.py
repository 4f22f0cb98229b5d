"""Which operations and shapes `kernel-builder benchmark` measures. test_benchmark.py has the errors."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_builder.measure.workloads import points
from kernel_format.errors import ConfigError


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
