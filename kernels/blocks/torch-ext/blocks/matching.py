"""Patterns of operations, written as expressions, and their matches in a graph.

`narrow(x * rsqrt(mean(x ** 2) + eps))` matches a norm however it is spelled, and binds `x` and `eps` to what the graph
has there. `wide(x)` is x in float32 and `narrow(y)` a float32 value rounded to the dtype of x, so a pattern states
where its formula rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch.fx import Node

from .values import added_dimensions, argument, dtype_of, is_tensor, operation, same_value, unwidened, value

_COMMUTATIVE = {"add", "mul"}


class Pattern:
    """An expression: a named value, a number, or an operation on expressions."""

    def __init__(self, name: str, *parts: Any) -> None:
        self.name, self.parts = name, parts

    def __add__(self, other: Any) -> "Pattern":
        return Pattern("add", self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> "Pattern":
        return Pattern("mul", self, other)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> "Pattern":
        return Pattern("sub", self, other)

    def __truediv__(self, other: Any) -> "Pattern":
        return Pattern("div", self, other)

    def __pow__(self, other: Any) -> "Pattern":
        return Pattern("pow", self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return Pattern("either", self, other)


class Named(Pattern):
    """A tensor; `number`: a number; `optional`: a tensor or None."""

    def __init__(self, name: str, number: bool = False, optional: bool = False) -> None:
        super().__init__("named", name)
        self.number, self.optional = number, optional


def wide(x: Pattern) -> Pattern:
    return Pattern("wide", x)


def narrow(x: Pattern) -> Pattern:
    return Pattern("narrow", x)


def mean(x: Pattern) -> Pattern:
    """The mean of the last dimension, which is kept."""
    return Pattern("mean", x)


def rsqrt(x: Pattern) -> Pattern:
    return Pattern("rsqrt", x) | x**-0.5


def sqrt(x: Pattern) -> Pattern:
    return Pattern("sqrt", x) | x**0.5


def one_plus(x: Pattern) -> Pattern:
    """Match `1 + x`, also where dimensions are added to the sum: `views` are then the nodes that add them."""
    return Pattern("one_plus", x)


def tagged(name: str, x: Pattern) -> Pattern:
    """Match `x`, and remember that it was this alternative."""
    return Pattern("tagged", name, x)


@dataclass
class Match:
    """The values and numbers of a pattern's names, the names of the alternatives, and the matched nodes."""

    values: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def bound(self, name: str, node: Any) -> Optional["Match"]:
        if name in self.values:
            return self if self.values[name] == node else None
        return Match({**self.values, name: node}, self.tags, self.nodes)

    def through(self, node: Any) -> "Match":
        return Match(self.values, self.tags, (*self.nodes, node)) if isinstance(node, Node) else self


def match(pattern: Pattern, node: Any) -> Optional[Match]:
    """Return the first match of a pattern whose result is `node`."""
    return next(_matches(pattern, node, Match(), dtype_of(node)), None)


def _matches(pattern: Any, node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
    """Return the matches of a pattern for an operand of an operation in `dtype`."""
    if not isinstance(pattern, Pattern):
        if not isinstance(node, Node) and node == pattern:
            yield match
        return
    kind = pattern.name
    if kind == "either":
        for part in pattern.parts:
            yield from _matches(part, node, match, dtype)
    elif kind == "tagged":
        tagged = Match(match.values, (*match.tags, pattern.parts[0]), match.nodes)
        yield from _matches(pattern.parts[1], node, tagged, dtype)
    elif kind == "named":
        node = same_value(node)
        assert isinstance(pattern, Named)
        is_number = isinstance(node, (int, float)) and not isinstance(node, bool)
        if is_number if pattern.number else is_tensor(node) or (pattern.optional and node is None):
            found = match.bound(pattern.parts[0], node)
            if found is not None:
                yield found
    elif kind == "one_plus":
        chain = list(added_dimensions(same_value(node)))
        if chain:
            inner = match.through(chain[0])
            for found in _calls(
                Pattern("add", 1, pattern.parts[0]) | Pattern("add", 1.0, pattern.parts[0]), chain[-1], inner
            ):
                yield Match({**found.values, "views": tuple(chain[:-1])}, found.tags, found.nodes)
    elif kind == "wide":
        inner = unwidened(node)
        if node is None or torch.float32 in (dtype, dtype_of(node)):
            yield from _matches(pattern.parts[0], inner, match, dtype_of(inner))
    elif kind == "narrow":
        node = same_value(node)
        if operation(node) == "cast" and dtype_of(node.args[0]) == torch.float32:
            inside, match = same_value(node.args[0]), match.through(node)
        else:
            inside = node
        if dtype_of(inside) == torch.float32:
            for found in _matches(pattern.parts[0], inside, match, torch.float32):
                if dtype_of(found["x"]) == dtype_of(node):
                    yield found
    else:
        yield from _calls(pattern, same_value(node), match)


def _calls(pattern: Pattern, node: Any, match: Match) -> Iterator[Match]:
    if pattern.name == "either":
        for part in pattern.parts:
            yield from _calls(part, node, match)
        return
    operands = _operands(pattern.name, node)
    if operands is None:
        return
    match, parts, dtype = match.through(node), pattern.parts, dtype_of(node)
    orders = [operands, operands[::-1]] if pattern.name in _COMMUTATIVE else [operands]
    for order in orders:
        yield from _all(parts, order, match, dtype)


def _all(parts: Any, operands: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
    if not parts:
        yield match
        return
    for found in _matches(parts[0], operands[0], match, dtype):
        yield from _all(parts[1:], operands[1:], found, dtype)


def _operands(name: str, node: Any) -> Optional[list[Any]]:
    """Return the operands of a call of the operation `name`, in the order of the pattern's."""
    if not isinstance(node, Node):
        return None
    own = operation(node)
    if name == "pow":
        if own == "square":
            return [node.args[0], 2]
        if own == "mul" and node.args[0] is node.args[1]:
            return [node.args[0], 2]
    if own != name:
        return None
    if name == "mean":
        dim, keeps = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        rank = value(node).dim()
        return [node.args[0]] if dim in (-1, rank - 1) and keeps else None
    if name in ("layer_norm", "rms_norm"):
        shape = argument(node, 1, "normalized_shape")
        if len(shape) != 1:
            return None
        named = ("weight", "bias") if name == "layer_norm" else ("weight",)
        given = [argument(node, 2 + index, part) for index, part in enumerate(named)]
        eps = argument(node, 2 + len(named), "eps", 1e-5 if name == "layer_norm" else None)
        return [node.args[0] if node.args else node.kwargs["input"], *given, eps]
    if name in ("silu", "gelu"):
        return [node.args[0] if node.args else node.kwargs["input"]]
    return None if node.kwargs else list(node.args)
