"""Rotary embeddings in a graph, recognized by the numbers that they compute.

The operations that lead from a value to a candidate for its rotation run on one row of random numbers, as the tables of
cosines and sines are. The result is that of the formula for a rotation, however the operations are spelled.
"""

import contextlib
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .editing import is_view
from .matching import dtype_of, is_tensor, operation, shape_of, unwidened, value

_WIDE = (torch.float32, torch.float64)
_SHAPES = {"view", "reshape", "flatten", "unflatten"}
_PARTS = {"getitem", "unbind", "chunk", "split", "cast", "contiguous", "clone", "view_as_complex"}
_FOLLOWED = _PARTS - {"cast"} | {"cat", "stack", "add", "sub", "neg", "view_as_real"}
_JOINTS = {"add", "sub", "cat", "stack", "view_as_real"}
_STEPS = 16  # from the result of a rotation to its products
_numbers = torch.Generator("cpu").manual_seed(0)


class _Unknown(Exception):
    """Other operations, or operations along other dimensions, are involved."""


class _Rows:
    """Runs operations on one row of a value: each of the leading dimensions has one element.

    Attributes:
        tables: By value: the row of a tensor that elements are multiplied by.
        nodes: The operations that have run.
    """

    def __init__(self, x: Node, row: Tensor) -> None:
        self._x = x
        self._leading = value(x).dim() - 1
        self._row = row.view(*[1] * self._leading, -1)
        self.tables: dict[Node, Tensor] = {}
        self.nodes: list[Node] = []

    def run(self, node: Any) -> Any:
        """Return the row of a node, or its rows.

        Raises:
            _Unknown: If there is none.
        """
        self.nodes += [node] if isinstance(node, Node) else []
        node = unwidened(node)
        if node is self._x:
            return self._row
        self.nodes.append(node)
        name = operation(node)
        if name == "mul" and len(node.args) == 2:
            return self._product(*node.args)
        if name == "empty_like":
            parts = [self.run(store.args[2]) for store in assignments_to(node)]
            if [store.args[1] for store in assignments_to(node)] == _PAIRS:
                return torch.stack(parts, -1).flatten(-2)
        if name == "cast" and dtype_of(node.args[0]) in _WIDE and operation(node.args[0]) in _SUMS:
            return self.run(node.args[0])  # it rounds a sum
        if name in _SHAPES:
            given, (leading, shape) = self.run(node.args[0]), self._split(node)
            if leading == self._split(node.args[0])[0] and all(type(size) is int for size in shape):
                return given.reshape(*[1] * self._leading, *shape)
        if name in _FOLLOWED:
            args, kwargs = map_arg(node.args, self.run), map_arg(node.kwargs, self.run)
            call = getattr(args[0], node.target) if node.op == "call_method" else partial(node.target, args[0])
            try:
                result = call(*args[1:], **kwargs)
            except (IndexError, RuntimeError):  # a part of a leading dimension
                raise _Unknown from None
            if isinstance(result, tuple) or result.shape[: self._leading] == (1,) * self._leading:
                return result
        raise _Unknown

    def _split(self, node: Node) -> tuple[Any, Any]:
        return shape_of(node)[: self._leading], shape_of(node)[self._leading :]

    def _product(self, first: Any, second: Any) -> Tensor:
        for given, table in ((first, second), (second, first)):
            with contextlib.suppress(_Unknown):
                row = self.run(given)
                if is_tensor(table) and row.shape[self._leading :] == shape_of(table)[-1:]:
                    self.tables.setdefault(table, _random(row.shape[-1], value(table).is_complex()))
                    return row * self.tables[table]
        raise _Unknown


_SUMS = ("add", "sub")
_PAIRS = [(Ellipsis, slice(0, None, 2)), (Ellipsis, slice(1, None, 2))]


def _random(size: int, is_complex: bool = False) -> Tensor:
    dtype = torch.complex128 if is_complex else torch.float64
    return torch.rand(size, generator=_numbers, dtype=dtype, device="cpu")


def halves(gate: Node, up: Node) -> tuple[Optional[Node], str]:
    """Return the value whose halves are `gate` and `up`, if there is one, and which half is the gate."""
    *leading, count = shape_of(gate)
    base = _whole(gate, (*leading, 2 * count))
    if base is None or not isinstance(count, int):
        return None, ""
    first, second = (row := _random(2 * count)).chunk(2)
    with contextlib.suppress(_Unknown):
        given = [_Rows(base, row).run(part).flatten() for part in (gate, up)]
        for half, parts in (("first", (first, second)), ("second", (second, first))):
            if all(map(torch.equal, given, parts)):
                return base, half
    return None, ""


# --- rotations --------------------------------------------------------------------------------------------------------


@dataclass
class Rotation:
    """The rotated value, its tables, the kind of its pairs, and the operations that compute it.

    Attributes:
        width: The number of elements at the start of a head that are rotated, if it is not the whole head.
    """

    x: Node
    cos: Node
    sin: Node
    pairs: str
    nodes: list[Node]
    width: Optional[int] = None


def rotation_in(node: Node) -> Optional[Rotation]:
    """Return the rotation whose result a node is, or None."""
    is_rounded = operation(node) == "cast" and dtype_of(node.args[0]) in _WIDE
    root = node.args[0] if is_rounded else node
    wholes = (_whole(part, shape_of(root)) for product in _products_in(root) for part in product.args)
    for x in dict.fromkeys(filter(is_tensor, wholes)):
        size = shape_of(x)[-1]
        if not isinstance(size, int):
            continue
        row = _random(size)
        rows = _Rows(x, row)
        try:
            result = rows.run(root)
        except _Unknown:
            continue
        for cos, sin in (*itertools.permutations(rows.tables, 2), *zip(rows.tables, rows.tables)):
            kind = _kind_of(row, rows.tables[cos], rows.tables[sin], result.flatten())
            if kind is not None:
                kept = [part for part in (node, *rows.nodes) if part is not x and operation(part) != "empty_like"]
                return Rotation(x, cos, sin, kind[0], kept, kind[1])
    return None


def _products_in(root: Node) -> list[Node]:
    """Return the products that a value is joined of by a few sums and rearrangements."""
    products: list[Node] = []
    pending: list[Any] = [root]
    steps = 0
    while pending and steps < _STEPS:
        part, steps = pending.pop(), steps + 1
        name = operation(part)
        if name == "mul":
            products.append(part)
        elif name == "empty_like":
            pending += [store.args[2] for store in assignments_to(part)]
        elif name in _JOINTS or is_view(part) or (name == "cast" and dtype_of(part.args[0]) in _WIDE):
            pending += part.all_input_nodes
    return products


def _whole(part: Any, shape: tuple[Any, ...]) -> Optional[Node]:
    """Return the value of a shape that another is a rearranged part of."""
    # A comparison of sizes in different places would bind a symbolic one: ranks come first.
    while isinstance(part, Node) and not (
        is_tensor(part) and value(part).dim() == len(shape) and shape_of(part) == shape
    ):
        follows = is_view(part) or operation(part) in _PARTS
        part = part.args[0] if follows and part.args else None
    return None if part is None else unwidened(part)


def _kind_of(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor) -> Optional[tuple[str, Optional[int]]]:
    """Return the kind of pairs of a rotation, and its width if it leaves the rest of a head; None for other results."""
    if cos is sin and cos.is_complex():
        cos, sin = cos.real, cos.imag
    count = len(cos)
    if sin.shape != cos.shape or cos.is_complex() or sin.is_complex():
        return None
    for width in (count, 2 * count):  # a value for each element, or for each pair
        if 4 <= width <= len(x) and width % 2 == 0:
            rotated, tables = x[:width], [cos, sin]
            first, second = rotated.chunk(2)
            interleaved = torch.stack((-rotated[1::2], rotated[::2]), -1).flatten()
            for pairs, turned in (("half", torch.cat((-second, first))), ("interleaved", interleaved)):
                if width != count:
                    tables = [t.repeat(2) if pairs == "half" else t.repeat_interleave(2) for t in (cos, sin)]
                expected = torch.cat((rotated * tables[0] + turned * tables[1], x[width:]))
                if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-12, atol=1e-12):
                    return pairs, width if width < len(x) else None
    return None


def assignments_to(node: Node) -> list[Node]:
    """Return the two assignments that fill a new tensor, if it is one."""
    return sorted(user for user in node.users if operation(user) == "setitem" and operation(node) == "empty_like")
