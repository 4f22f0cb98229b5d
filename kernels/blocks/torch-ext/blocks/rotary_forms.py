"""The forms of rotary embeddings in a graph of Dynamo's.

A rotation is `x * cos + turned(x) * sin`, where `turned` moves and negates elements of a row; or the same for the two
elements of each pair, joined again; or a product of complex numbers. Where the elements of x and of the tables come
from follows from the graph (`values.row_source`), so no spelling has to be known.
"""

from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch.fx import Node

from .editing import is_view
from .values import (
    argument,
    counted,
    dtype_of,
    is_tensor,
    operation,
    row_source,
    same_value,
    shape_of,
    unwidened,
    value,
)

_WIDE = (torch.float32, torch.float64)


@dataclass
class Rotation:
    """The rotated value, its tables, the kind of its pairs, and the operations that compute it.

    Attributes:
        width: The number of elements at the start of a head that are rotated.
    """

    x: Node
    cos: Node
    sin: Node
    pairs: str
    nodes: list[Node]
    width: Optional[int] = None


def rotation_in(node: Node) -> Optional[Rotation]:
    """Return the rotation whose result a node is, or None."""
    root, nodes = node, []
    if operation(node) == "cast" and dtype_of(node.args[0]) in _WIDE:
        root, nodes = same_value(node.args[0]), [node]
    if operation(root) == "add":
        return _of_elements(root, nodes)
    return _partial(root, nodes) or _complex(root, nodes) or _of_pairs(root, nodes)


def _partial(root: Node, nodes: list[Node]) -> Optional[Rotation]:
    """Return the parts of `cat((rotation of x[..., :width], x[..., width:]), -1)`."""
    parts = (
        root.args[0] if operation(root) == "cat" and argument(root, 1, "dim", 0) in (-1, value(root).dim() - 1) else ()
    )
    inner = rotation_in(same_value(parts[0])) if len(parts) == 2 and not nodes else None
    if inner is None:
        return None
    whole = _whole(inner.x, shape_of(root))
    (base, first), (other, second) = row_source(inner.x, whole), row_source(parts[1], whole)
    places = torch.cat((first.reshape(-1), second.reshape(-1)))
    if base is not whole or base is not other or not torch.equal(places, counted(1, places.numel())):
        return None
    return replace(inner, x=base, width=first.numel(), nodes=[*inner.nodes, root])


def _complex(root: Node, nodes: list[Node]) -> Optional[Rotation]:
    """Return the parts of `view_as_real(view_as_complex(x in pairs) * rotations).flatten(-2)`."""
    real = same_value(root.args[0]) if is_view(root) and root.args else None
    product = same_value(real.args[0]) if operation(real) == "view_as_real" else None
    if operation(product) != "mul" or not all(map(is_tensor, product.args)):
        return None
    for given, rotations in (product.args, product.args[::-1]):
        if operation(given) != "view_as_complex" or value(rotations).dtype != torch.complex64:
            continue
        whole = _whole(given.args[0], shape_of(root))
        x, places = row_source(given.args[0], whole)
        if x is whole and places.ndim == 2 and torch.equal(places.reshape(-1), counted(1, places.numel())):
            return Rotation(x, rotations, rotations, "interleaved", [*nodes, root, real, product])
    return None


def _of_pairs(root: Node, nodes: list[Node]) -> Optional[Rotation]:
    """Return the parts of `a * cos - b * sin` and `a * sin + b * cos`, joined, where a and b are elements of x."""
    joined = _joined(root)
    if joined is None:
        return None
    first, second, pairs, joining = joined
    if operation(first) != "sub" or operation(second) != "add" or first.kwargs or second.kwargs:
        return None
    products = [same_value(part) for part in (*first.args, *second.args)]
    if not all(operation(product) == "mul" and all(map(is_tensor, product.args)) for product in products):
        return None
    for a, cos in (products[0].args, products[0].args[::-1]):
        for b, sin in (products[1].args, products[1].args[::-1]):
            sides = {frozenset(map(unwidened, (a, sin))), frozenset(map(unwidened, (b, cos)))}
            if sides != {frozenset(map(unwidened, product.args)) for product in products[2:]}:
                continue
            whole = _whole(a, shape_of(root))
            (x, even), (other, odd) = row_source(a, whole), row_source(b, whole)
            if x is not whole or x is not other or even.ndim != 1:
                continue
            places = torch.cat((even, odd)) if pairs == "half" else torch.stack((even, odd), -1).reshape(-1)
            if torch.equal(places, counted(1, places.numel())):
                return Rotation(
                    x, same_value(cos), same_value(sin), pairs, [*nodes, *joining, first, second, *products]
                )
    return None


def _whole(part: Any, shape: tuple[Any, ...]) -> Optional[Node]:
    """Return the value of a shape that another is a rearranged part of."""
    while isinstance(part, Node) and not (is_tensor(part) and shape_of(part) == shape):
        follows = is_view(part) or operation(part) in ("getitem", "unbind", "chunk", "split", "cast", "contiguous")
        part = part.args[0] if follows and part.args else None
    return None if part is None else unwidened(part)


def _joined(root: Node) -> Optional[tuple[Node, Node, str, list[Node]]]:
    """Return the two values that are joined to rows, the kind of pairs that they make, and the operations."""
    if (
        operation(root) == "cat"
        and len(root.args[0]) == 2
        and argument(root, 1, "dim", 0) in (-1, value(root).dim() - 1)
    ):
        return *map(same_value, root.args[0]), "half", [root]
    stack = same_value(root.args[0]) if is_view(root) and root.args else None
    if (
        operation(stack) == "stack"
        and len(stack.args[0]) == 2
        and argument(stack, 1, "dim", 0) in (-1, value(stack).dim() - 1)
    ):
        return *map(same_value, stack.args[0]), "interleaved", [root, stack]
    if operation(root) == "empty_like":
        stores = assignments_to(root)
        steps = [store.args[1] for store in stores]
        if steps == [(Ellipsis, slice(0, None, 2)), (Ellipsis, slice(1, None, 2))]:
            return *(same_value(store.args[2]) for store in stores), "interleaved", []
    return None


def _of_elements(root: Node, nodes: list[Node]) -> Optional[Rotation]:
    """Return the parts of `x * cos + turned(x) * sin`."""
    products = [same_value(part) for part in root.args]
    if root.kwargs or not all(
        operation(product) == "mul" and all(map(is_tensor, product.args)) for product in products
    ):
        return None
    for straight, turned in (products, products[::-1]):
        for given, cos in (straight.args, straight.args[::-1]):
            x = unwidened(given)
            for part, sin in (turned.args, turned.args[::-1]):
                base, places = row_source(part, x)
                pairs = _pairs_of(places) if base is x else None
                if pairs is not None:
                    return Rotation(x, same_value(cos), same_value(sin), pairs, [*nodes, root, straight, turned])
    return None


def _pairs_of(places: Any) -> Optional[str]:
    """Return the kind of pairs whose elements change places, the first of them negated; None for any other change."""
    count = places.numel()
    if places.ndim != 1 or count < 4 or count % 2:
        return None
    first = counted(1, count)
    if torch.equal(places, torch.cat((-first[count // 2 :], first[: count // 2]))):
        return "half"
    return "interleaved" if torch.equal(places, torch.stack((-first[1::2], first[::2]), -1).reshape(-1)) else None


def assignments_to(node: Node) -> list[Node]:
    """Return the two assignments that fill a new tensor, if it is one."""
    return (
        sorted(user for user in node.users if operation(user) == "setitem") if operation(node) == "empty_like" else []
    )
