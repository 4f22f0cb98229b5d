"""Values in Dynamo's FX graphs: their operations, dtypes and shapes.

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
_OTHER_NAMES |= {"radd": "add", "rmul": "mul"}  # of a number and a tensor, in any order
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
    name = name.strip("_") if name.startswith("__") else name  # methods of operators
    return _OTHER_NAMES.get(name, name)


def changes(node: Node) -> bool:
    """Return whether a node writes to a tensor, or changes a mode that operations depend on."""
    if node.op not in ("call_method", "call_function"):
        return node.op not in ("placeholder", "output", "get_attr")
    name = operation(node)
    if name in _CHANGES or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_"):  # as in `operator`
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
