"""Operations in Dynamo's FX graphs, and patterns of them that are written as expressions.

Dynamo's graphs hold calls of Torch as the model wrote them. `operation` gives one name to an operation, however it is
spelled (`x.float()`, `x.to(torch.float32)`), so that patterns need one form: `narrow(x * rsqrt(mean(x ** 2) + eps))`
matches a norm, and binds `x` and `eps`. `wide(x)` is x in float32, `narrow(y)` a float32 value rounded to x's dtype.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Optional, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .kernel_set import PACKAGES

_CASTS = {"to", "float", "half", "bfloat16", "type_as", "type", "double"}
_OTHER_NAMES = {"truediv": "div", "true_divide": "div", "subtract": "sub", "multiply": "mul"}
_OTHER_NAMES |= {"radd": "add", "rmul": "mul"}  # of a number and a tensor, in any order
_NORMS: dict[str, dict[str, Any]] = {  # their parameters after the shape, and the defaults
    "layer_norm": {"weight": None, "bias": None, "eps": 1e-5},
    "rms_norm": {"weight": None, "eps": None},
}
_HOMES = ("torch.", "_operator.", "builtins.")  # the modules of Torch's functions, of operators, and of `getattr`
WIDE = (torch.float32, torch.float64)
CHANGES = {"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"}
CHANGES |= {"iand", "ior", "ixor", "ilshift", "irshift"}


def value(node: Any) -> Any:
    """Return the fake tensor that Dynamo computed for a node, or a constant operand itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def dtype_of(node: Any) -> Optional[torch.dtype]:
    return value(node).dtype if is_tensor(node) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    """Return the sizes of a value: comparing symbolic ones adds no guard to the graph."""
    return tuple(n if isinstance(n, int) else n.node.maybe_as_int() or _Size(n) for n in value(node).shape)


@dataclass(eq=False)
class _Size:  # noqa: PLW1641 - unhashable
    size: torch.SymInt

    def __eq__(self, other: Any) -> bool:
        """Return whether the guards of the trace imply that a size is equal."""
        return statically_known_true(self.size == (other.size if isinstance(other, _Size) else other))


def walk(nodes: Iterable[Any], follow: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield nodes, and those that `follow` returns for each of them, once."""
    pending, seen = [*nodes], set()
    while pending:
        if (node := pending.pop()) not in seen:
            seen.add(node)
            yield node
            pending += follow(node)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def operation(node: Any) -> str:
    """Return the name of a call's operation: "cast" for conversions of the dtype alone, "" if it is not Torch's own."""
    if not isinstance(node, Node) or node.op not in ("call_method", "call_function"):
        return ""
    home = f"{getattr(node.target, '__module__', None) or 'torch'}."  # methods have none
    if not home.startswith(_HOMES) or (home.startswith(("torch._ops.", "torch.ops.")) and home != "torch._ops.aten."):
        return ""  # an op of a library, or a function of a user's, with the name of an operation
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in _CASTS and is_tensor(node) and node.args and is_tensor(node.args[0]):
        return "cast" if value(node).device == value(node.args[0]).device else "transfer"
    name = name.strip("_") if name.startswith("__") else name  # methods of operators
    return _OTHER_NAMES.get(name, name)


def changes(node: Node) -> bool:
    """Return whether a node may write to a tensor, or changes a mode that operations depend on."""
    if node.op not in ("call_method", "call_function"):
        return node.op not in ("placeholder", "output", "get_attr")
    name, target = operation(node), cast(Any, node.target)
    writes = name in CHANGES or (name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_"))
    writes |= name.endswith(("batch_norm", "instance_norm")) or name.startswith("wrapped_")  # statistics; of NumPy
    writes |= name.startswith("embedding") and argument(node, 3, "max_norm") is not None
    if writes or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    ops = [getattr(target, each) for each in target.overloads()] if hasattr(target, "overloads") else [target]
    schemas = [op._schema for op in ops if hasattr(op, "_schema")]
    if schemas or not name:  # a function without a schema may run any code, as the bodies of checkpoints do
        given = (x for schema in schemas for x in schema.arguments if not x.kwarg_only or x.name in node.kwargs)
        writes = any(x.alias_info and x.alias_info.is_write for x in given)
        return writes or not (schemas or target.__module__.startswith(PACKAGES))
    is_functional = getattr(target, "__module__", "") == "torch.nn.functional"  # takes `inplace` by position
    is_mode = name.startswith(("_enter", "_exit", "_set_", "set_", "_vmap_"))
    return is_mode or (is_functional and node.args[-1:] == (True,))


def unwidened(node: Any) -> Any:
    """Return the value of which a node is a cast to float32 or float64, or the node."""
    while operation(node) == "cast" and dtype_of(node) in WIDE and value(node.args[0]).is_floating_point():
        node = node.args[0]
    return node


def adds_dimensions(node: Any) -> bool:
    name = operation(node)
    index = node.args[1] if name == "getitem" and is_tensor(node.args[0]) else ()
    adds = bool(index) and isinstance(index, tuple) and all(part is None or part == slice(None) for part in index)
    return adds or name == "unsqueeze"


@dataclass(frozen=True)
class Match:
    """The values and numbers of a pattern's names, the names of the alternatives, and the matched nodes."""

    values: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def through(self, node: Any) -> "Match":
        return replace(self, nodes=(*self.nodes, node)) if isinstance(node, Node) else self


# Takes an operand of an operation, the match so far, and the operation's dtype.
_Find = Callable[[Any, Match, Optional[torch.dtype]], Iterator[Match]]


def _operator(name: str) -> Callable[[Any, Any], "Pattern"]:
    return lambda pattern, other: call(name, pattern, other)


class Pattern:
    """An expression: a named value, or an operation on expressions and numbers. `find` yields its matches."""

    def __init__(self, find: _Find) -> None:
        self.find = find

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__, __pow__ = _operator("div"), _operator("pow")

    def __or__(self, other: "Pattern") -> "Pattern":
        return Pattern(lambda *operand: itertools.chain(self.find(*operand), other.find(*operand)))


def named(name: str, number: bool = False, optional: bool = False) -> Pattern:
    """Match a tensor; `number`: a number; `optional`: a tensor or None. The same name is the same value everywhere."""

    def find(node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
        is_number = isinstance(node, (int, float)) and not isinstance(node, bool)
        fits = is_number if number else is_tensor(node) or (optional and node is None)
        if fits and match.values.get(name, node) == node:
            yield replace(match, values={**match.values, name: node})

    return Pattern(find)


def call(name: str, *parts: Any) -> Pattern:
    """Match a call of an operation, by the name that `operation` gives it."""

    def find(node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
        operands = _operands(name, node)
        if operands is not None:
            for order in (operands, operands[::-1]) if name in ("add", "mul") else (operands,):
                yield from _find_all(parts, order, match.through(node), dtype_of(node))

    return Pattern(find)


def _find_all(parts: Any, operands: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
    if not parts:
        yield match
    elif isinstance(parts[0], Pattern):
        for found in parts[0].find(operands[0], match, dtype):
            yield from _find_all(parts[1:], operands[1:], found, dtype)
    elif not isinstance(operands[0], Node) and operands[0] == parts[0]:
        yield from _find_all(parts[1:], operands[1:], match, dtype)


def wide(x: Pattern) -> Pattern:
    def find(node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
        inner = unwidened(node)
        if node is None or torch.float32 in (dtype, dtype_of(node)):
            while node is not inner:  # `inner` may be written after a cast
                match, node = match.through(node), node.args[0]
            yield from x.find(inner, match, dtype_of(inner))

    return Pattern(find)


def narrow(x: Pattern) -> Pattern:
    def find(node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
        inside = node
        if operation(node) == "cast" and dtype_of(node.args[0]) == torch.float32:
            inside, match = node.args[0], match.through(node)
        if dtype_of(inside) == torch.float32:
            for found in x.find(inside, match, torch.float32):
                if dtype_of(found["x"]) == dtype_of(node):
                    yield found

    return Pattern(find)


def one_plus(x: Pattern) -> Pattern:
    """Match `1 + x`, also where dimensions are added to the sum: `views` are then the nodes that add them."""
    total = call("add", 1, x)

    def find(node: Any, match: Match, dtype: Optional[torch.dtype]) -> Iterator[Match]:
        views, inner = [], node
        while adds_dimensions(inner):
            views.append(inner)
            inner = inner.args[0]
        for found in total.find(inner, match.through(node), dtype):
            yield replace(found, values={**found.values, "views": tuple(views)})

    return Pattern(find)


def tagged(name: str, x: Pattern) -> Pattern:
    """Match `x`, and remember that it was this alternative."""
    return Pattern(lambda node, match, dtype: x.find(node, replace(match, tags=(*match.tags, name)), dtype))


def matches(pattern: Pattern, node: Any) -> Iterator[Match]:
    """Yield the matches of a pattern whose result is `node`."""
    return pattern.find(node, Match(), dtype_of(node))


def _operands(name: str, node: Any) -> Optional[list[Any]]:
    """Return the operands of a call of the operation `name`, in the order of the pattern's."""
    if not isinstance(node, Node):
        return None
    own = operation(node)
    if name == "pow" and (own == "square" or (own == "mul" and node.args[0] is node.args[1])):
        return [node.args[0], 2]
    if own != name:
        return None
    first = argument(node, 0, "input")
    if name == "mean":
        dim, keeps = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
        dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
        return [first] if dim in (-1, value(node).dim() - 1) and keeps and dtype_of(node) == dtype_of(first) else None
    if name in _NORMS:
        given = [argument(node, 2 + index, *part) for index, part in enumerate(_NORMS[name].items())]
        return [first, *given] if len(argument(node, 1, "normalized_shape")) == 1 else None
    if name in ("silu", "gelu"):
        return [first]
    return None if node.kwargs else list(node.args)
