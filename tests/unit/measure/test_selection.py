"""Which operations and shapes `kernel-builder benchmark` measures, and how unknown ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_builder.measure.results import Point
from kernel_builder.measure.selection import operations, points
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


def shapes(*wanted: str, **more: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [point[:3] for point in points(ALL, "cuda", shapes=wanted, **more)]


def test_all_declared_points_are_selected() -> None:
    assert [str(point) for point in points(ALL, "cuda")] == [
        "norm, forward, bfloat16, 4x2048",
        "norm, forward, bfloat16, 8x2048",
        "norm, forward, bfloat16, 8x128",
        "norm, backward, bfloat16, 8x2048",
        "rope, forward, bfloat16, 1x2x3",
    ]
    assert [point.shape for point in points(ALL, "cpu")] == [(4, 64), (1, 2, 3)]
    assert points({"norm": Norm}, "cpu", dtypes=("float32", "float16")) == [
        Point("norm", "forward", (4, 64), "float32"),
        Point("norm", "forward", (4, 64), "float16"),
    ]


def test_patterns_select_declared_shapes_and_shapes_stand_for_themselves() -> None:
    assert shapes("4x*") == [("norm", "forward", (4, 2048))]
    assert shapes("8x128", "8x*") == [
        ("norm", "forward", (8, 128)),
        ("norm", "forward", (8, 2048)),
        ("norm", "backward", (8, 128)),
        ("norm", "backward", (8, 2048)),
    ]
    assert shapes("5x7") == [("norm", "forward", (5, 7)), ("norm", "backward", (5, 7))]
    assert shapes("9x9x9") == [("rope", "forward", (9, 9, 9))]


def test_operations_are_selected_by_name() -> None:
    assert list(operations(ALL, [])) == ["norm", "rope"]
    assert list(operations(ALL, ["rope"])) == ["rope"]
    with pytest.raises(ConfigError, match="'rop' is none of norm, rope"):
        operations(ALL, ["rop"])
    with pytest.raises(ConfigError, match="no shape is declared for xpu"):
        points({"rope": Rope}, "xpu")
