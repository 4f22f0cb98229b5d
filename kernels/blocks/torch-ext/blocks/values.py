"""Values in Dynamo's FX graphs: their operations, dtypes and shapes, and where the elements of their rows come from.

Dynamo's graphs hold calls of Torch as the model wrote them. `operation` gives one name to an operation, however it is
spelled (`x.float()`, `x.to(torch.float32)`), so that patterns need one form.
"""

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

_CASTS = {"to", "float", "half", "bfloat16", "type_as", "type", "double"}
_OTHER_NAMES = {"truediv": "div", "true_divide": "div", "subtract": "sub", "multiply": "mul"}
_CHANGES = {"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior"}


def value(node: Any) -> Any:
    """Return the fake tensor that Dynamo computed for a node, or a constant operand itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def dtype_of(node: Any) -> Optional[torch.dtype]:
    return value(node).dtype if is_tensor(node) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    return tuple(value(node).shape)


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def operation(node: Any) -> str:
    """Return the name of a call's operation: "cast" for conversions of the dtype alone, "" for anything but a call."""
    if not isinstance(node, Node) or node.op not in ("call_method", "call_function"):
        return ""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in _CASTS and is_tensor(node) and node.args and is_tensor(node.args[0]):
        return "cast" if value(node).device == value(node.args[0]).device else "transfer"
    return _OTHER_NAMES.get(name, name)


def changes(node: Node) -> bool:
    """Return whether a node writes to a tensor, or changes a mode that operations depend on."""
    if node.op not in ("call_method", "call_function"):
        return node.op not in ("placeholder", "output", "get_attr")
    name = operation(node)
    if name in _CHANGES or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    # Functions of `torch.nn.functional` take `inplace` by position.
    is_functional = getattr(node.target, "__module__", "") == "torch.nn.functional"
    return name.startswith(("_enter", "_exit", "_set_", "set_")) or (is_functional and node.args[-1:] == (True,))


def same_value(node: Any) -> Any:
    """Return the value that a node passes on, as casts to the dtype that it has do, and dropouts that drop nothing."""
    while isinstance(node, Node) and node.args:
        # `copy` and a memory format make a new tensor of the same dtype.
        is_cast = operation(node) == "cast" and not {"copy", "memory_format"} & {*node.kwargs} and True not in node.args
        if not (is_cast and dtype_of(node) == dtype_of(node.args[0])) and not (
            operation(node) == "dropout" and argument(node, 2, "training", True) is False
        ):
            break
        node = node.args[0]
    return node


def unwidened(node: Any) -> Any:
    """Return the value of which a node is a cast to float32 or float64, or the node."""
    node = same_value(node)
    while operation(node) == "cast" and dtype_of(node) in (torch.float32, torch.float64):
        inner = same_value(node.args[0])
        if not value(inner).is_floating_point():
            break
        node = inner
    return node


def added_dimensions(node: Any) -> Iterator[Node]:
    """Return a node and the values that it is made of by adding dimensions, up to the first other operation."""
    while isinstance(node, Node):
        yield node
        name = operation(node)
        index = node.args[1] if name == "getitem" and is_tensor(node.args[0]) else ()
        adds = bool(index) and isinstance(index, tuple) and all(part is None or part == slice(None) for part in index)
        if name != "unsqueeze" and not adds:
            return
        node = node.args[0]


# --- the elements of a row --------------------------------------------------------------------------------------------

_Source = tuple[Node, Tensor]


def counted(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1, device="cpu")


def row_source(node: Any, stop: Any = None) -> _Source:
    """Return the value whose rows a node rearranges, and for each element of a row its place there.

    Places count from 1 and are negative for negated elements. The array has as many dimensions as views have made of
    the last one. The value `stop` is not looked into.
    """
    node = unwidened(node)
    follow = _FOLLOWED.get(operation(node))
    source = None if node is stop or follow is None or not node.args else follow(node, stop)
    if source is not None:
        return source
    size = shape_of(node)[-1] if value(node).dim() else 0
    return node, counted(1, size) if isinstance(size, int) else counted(1, 0)


def _follow_copy(node: Node, stop: Any) -> Optional[_Source]:
    return row_source(node.args[0], stop)


def _follow_negation(node: Node, stop: Any) -> Optional[_Source]:
    base, places = row_source(node.args[0], stop)
    return base, -places


def _follow_join(node: Node, stop: Any) -> Optional[_Source]:
    """Follow `cat` and `stack` along the last dimension."""
    if argument(node, 1, "dim", 0) not in (-1, value(node).dim() - 1):
        return None
    sources = [row_source(part, stop) for part in node.args[0]]
    base, places = sources[0][0], [places for _, places in sources]
    if any(other is not base for other, _ in sources):
        return None
    if operation(node) == "cat":
        return base, torch.cat(places, -1)
    return (base, torch.stack(places, -1)) if len({part.shape for part in places}) == 1 else None


def _follow_view(node: Node, stop: Any) -> Optional[_Source]:
    """Follow a view that splits or joins the last dimensions only."""
    base, places = row_source(node.args[0], stop)
    before, after = shape_of(node.args[0]), shape_of(node)
    leading = len(before) - places.ndim
    shape = after[leading:]
    if after[:leading] != before[:leading] or not shape or not all(isinstance(size, int) for size in shape):
        return None
    return base, places.reshape(shape)


def _follow_index(node: Node, stop: Any) -> Optional[_Source]:
    given, index = node.args
    if operation(given) in ("chunk", "split", "unbind") and isinstance(index, int):
        return _follow_part(given, index, stop)
    if not is_tensor(given):
        return None
    base, places = row_source(given, stop)
    index = index if isinstance(index, tuple) else (index,)
    missing = value(given).dim() - sum(part is not Ellipsis for part in index)
    where = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
    index = (*index[:where], *[slice(None)] * missing, *index[where + 1 :])
    leading, kept, seen = value(given).dim() - places.ndim, [], 0
    for part in index:
        if seen < leading:
            if not isinstance(part, slice):
                return None
            seen += 1
        elif not _is_constant(part):
            return None
        else:
            kept.append(part)
    return base, places[tuple(kept)]


def _is_constant(part: Any) -> bool:
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return type(part) is int


def _follow_part(given: Node, index: int, stop: Any) -> Optional[_Source]:
    """Follow one part of `chunk`, `split` or `unbind` along the last dimension."""
    name = operation(given)
    base, places = row_source(given.args[0], stop)
    dim = argument(given, 1 if name == "unbind" else 2, "dim", 0)
    if dim not in (-1, value(given.args[0]).dim() - 1):
        return None
    if name == "unbind":
        return base, places[..., index]
    parts = argument(given, 1, "chunks" if name == "chunk" else "split_size_or_sections")
    size = places.shape[-1]
    if name == "chunk":
        parts = -(-size // parts)
    return base, places.split(parts, -1)[index]


_FOLLOWED = {
    **dict.fromkeys(("contiguous", "clone"), _follow_copy),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten"), _follow_view),
    **dict.fromkeys(("cat", "stack"), _follow_join),
    "neg": _follow_negation,
    "getitem": _follow_index,
}
