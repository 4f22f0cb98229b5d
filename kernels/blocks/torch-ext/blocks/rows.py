"""Where the elements of a value's rows come from, and the rotary embeddings that follow from it.

A rotation of pairs is `x * cos + turned(x) * sin`, where `turned` moves and negates elements of a row; or the same for
the two elements of each pair, joined again. Both are sums of elements of x, each times an entry of a table, so no
spelling has to be known. A rotation may also be a product of complex numbers.
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

from .editing import is_view
from .values import argument, dtype_of, is_tensor, operation, same_value, shape_of, unwidened, value

_WIDE = (torch.float32, torch.float64)
# The sum in each element: by table, or None for elements that are not multiplied, the place of an element in the base,
# and of an entry in the table. Places count from 1, are negative for negated elements, and 0 where the sum lacks the
# table. [2, ...], with as many dimensions as views have made of a row.
_Sums = dict[Optional[Node], Tensor]
_Row = tuple[Node, _Sums]


def counted(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1, device="cpu")


def row_source(node: Any, stop: Any = None) -> tuple[Node, Tensor]:
    """Return the value whose rows a node rearranges, and for each element of a row its place there.

    The array has as many dimensions as views have made of the last one. The value `stop` is not looked into.
    """
    base, sums = _row_of(node, stop)
    return base, sums[None][0] if {*sums} == {None} else counted(1, 0)


def _row_of(node: Any, stop: Any) -> _Row:
    node = unwidened(node)
    follow = _FOLLOWED.get(operation(node))
    row = None if node is stop or follow is None or not node.args else follow(node, stop)
    if row is not None:
        return row
    size = shape_of(node)[-1] if value(node).dim() else 0
    places = counted(1, size) if isinstance(size, int) else counted(1, 0)
    return node, {None: torch.stack((places, torch.zeros_like(places)))}


def _joined(parts: Any, stop: Any, join: Any) -> Optional[_Row]:
    rows = [_row_of(part, stop) for part in parts]
    base, tables = rows[0][0], {table: None for _, sums in rows for table in sums}
    shapes = [next(iter(sums.values())).shape for _, sums in rows]
    if any(other is not base for other, _ in rows) or (join is torch.stack and len({*shapes}) > 1):
        return None
    if len({len(shape) for shape in shapes}) > 1:
        return None
    zeros = [torch.zeros(shape, dtype=torch.long, device="cpu") for shape in shapes]
    return base, {table: join([row[1].get(table, zero) for row, zero in zip(rows, zeros)], -1) for table in tables}


def _follow_join(node: Node, stop: Any) -> Optional[_Row]:
    """Follow `cat` and `stack` along the last dimension."""
    if argument(node, 1, "dim", 0) not in (-1, value(node).dim() - 1):
        return None
    return _joined(node.args[0], stop, torch.cat if operation(node) == "cat" else torch.stack)


def _follow_stores(node: Node, stop: Any) -> Optional[_Row]:
    """Follow the two assignments that fill a new tensor."""
    stores = assignments_to(node)
    if [store.args[1] for store in stores] != [(Ellipsis, slice(0, None, 2)), (Ellipsis, slice(1, None, 2))]:
        return None
    row = _joined([store.args[2] for store in stores], stop, torch.stack)
    return None if row is None else (row[0], {table: places.flatten(-2) for table, places in row[1].items()})


def _follow_view(node: Node, stop: Any) -> Optional[_Row]:
    """Follow a view that splits or joins the last dimensions only."""
    base, sums = _row_of(node.args[0], stop)
    before, after = shape_of(node.args[0]), shape_of(node)
    leading = len(before) - next(iter(sums.values())).ndim + 1
    shape = after[leading:]
    if after[:leading] != before[:leading] or not shape or not all(isinstance(size, int) for size in shape):
        return None
    return base, {table: places.reshape(2, *shape) for table, places in sums.items()}


def _follow_index(node: Node, stop: Any) -> Optional[_Row]:
    given, index = node.args
    if operation(given) in ("chunk", "split", "unbind") and isinstance(index, int):
        return _follow_part(given, index, stop)
    if not is_tensor(given):
        return None
    base, sums = _row_of(given, stop)
    index = index if isinstance(index, tuple) else (index,)
    missing = value(given).dim() - sum(part is not Ellipsis for part in index)
    where = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
    index = (*index[:where], *[slice(None)] * missing, *index[where + 1 :])
    leading = value(given).dim() - next(iter(sums.values())).ndim + 1
    if not all(isinstance(part, slice) for part in index[:leading]) or not all(map(_is_constant, index[leading:])):
        return None
    at = slice(None), *index[leading:]
    return base, {table: places[at] for table, places in sums.items()}


def _is_constant(part: Any) -> bool:
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return type(part) is int


def _follow_part(given: Node, index: int, stop: Any) -> Optional[_Row]:
    """Follow one part of `chunk`, `split` or `unbind` along the last dimension."""
    name = operation(given)
    if argument(given, 1 if name == "unbind" else 2, "dim", 0) not in (-1, value(given.args[0]).dim() - 1):
        return None
    base, sums = _row_of(given.args[0], stop)
    if name == "unbind":
        return base, {table: places[..., index] for table, places in sums.items()}
    parts = argument(given, 1, "chunks" if name == "chunk" else "split_size_or_sections")
    if name == "chunk":
        parts = -(-next(iter(sums.values())).shape[-1] // parts)
    return base, {table: places.split(parts, -1)[index] for table, places in sums.items()}


def _follow_sum(node: Node, stop: Any) -> Optional[_Row]:
    """Follow a sum or a difference of two products with tables."""
    sums: _Sums = {}
    for index, part in enumerate(node.args if stop is not None and not node.kwargs else ()):
        product = _product(same_value(part), stop)
        if product is None or product[0] in sums:
            return None
        sign = torch.tensor([-1 if index == 1 and operation(node) == "sub" else 1, 1], device="cpu")
        sums[product[0]] = product[1] * sign[:, None]
    return (stop, sums) if len(sums) == 2 else None


def _product(node: Any, x: Any) -> Optional[tuple[Node, Tensor]]:
    """Return the table of a product with elements of x, and the places of both."""
    for given, table in (node.args, node.args[::-1]) if operation(node) == "mul" and len(node.args) == 2 else ():
        if is_tensor(given) and is_tensor(table):
            base, places = row_source(given, x)
            if base is x and places.ndim == 1 and shape_of(table)[-1:] == (places.numel(),):
                return same_value(table), torch.stack((places, counted(1, places.numel())))
    return None


def _follow_negation(node: Node, stop: Any) -> _Row:
    base, sums = _row_of(node.args[0], stop)
    return base, {table: places * torch.tensor([-1, 1], device="cpu")[:, None] for table, places in sums.items()}


def _follow_rounding(node: Node, stop: Any) -> Optional[_Row]:
    inner = same_value(node.args[0])
    is_sum = dtype_of(inner) in _WIDE and operation(inner) in ("add", "sub")
    return _follow_sum(inner, stop) if is_sum else None


_FOLLOWED: dict[str, Any] = {
    **dict.fromkeys(("contiguous", "clone"), lambda node, stop: _row_of(node.args[0], stop)),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten"), _follow_view),
    **dict.fromkeys(("cat", "stack"), _follow_join),
    **dict.fromkeys(("add", "sub"), _follow_sum),
    "cast": _follow_rounding,
    "empty_like": _follow_stores,
    "getitem": _follow_index,
    "neg": _follow_negation,
}


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
    root = same_value(node.args[0]) if is_rounded else node
    nodes = list(dict.fromkeys((node, root, *_operations_of(root))))
    products = [part for part in nodes if operation(part) == "mul"]
    wholes = (_whole(part, shape_of(root)) for product in products for part in product.args)
    for x in dict.fromkeys(whole for whole in wholes if whole is not None):
        base, sums = _row_of(root, x)
        tables = [table for table in sums if table is not None]
        if base is x and len(tables) == 2:
            for cos, sin in (tables, tables[::-1]):
                kind = _kind_of(sums[cos].flatten(1), sums[sin].flatten(1), sums.get(None))
                if kind is not None:
                    kept = [part for part in nodes if operation(part) != "empty_like"]
                    return Rotation(x, cos, sin, kind[0], kept, kind[1])
    return _complex(root, nodes)


def _operations_of(root: Any) -> list[Node]:
    """Return the operations that join sums of products, the sums, and the products, or none."""
    name, parts = operation(root), []
    if name in ("add", "sub"):
        products = [same_value(part) for part in root.args]
        return [root, *products] if all(operation(product) == "mul" for product in products) else []
    if name in ("cat", "stack"):
        parts = list(root.args[0])
    elif name == "empty_like":
        parts = [store.args[2] for store in assignments_to(root)]
    elif (is_view(root) and root.args) or (name == "cast" and dtype_of(root.args[0]) in _WIDE):
        parts = [root.args[0]]
    below = [node for part in parts if is_tensor(part) for node in _operations_of(same_value(part))]
    return [root, *below] if below else []


def _whole(part: Any, shape: tuple[Any, ...]) -> Optional[Node]:
    """Return the value of a shape that another is a rearranged part of."""
    # A comparison of sizes in different places would bind a symbolic one: ranks come first.
    while isinstance(part, Node) and not (
        is_tensor(part) and value(part).dim() == len(shape) and shape_of(part) == shape
    ):
        follows = is_view(part) or operation(part) in ("getitem", "unbind", "chunk", "split", "cast", "contiguous")
        part = part.args[0] if follows and part.args else None
    return None if part is None else unwidened(part)


def _kind_of(cos: Tensor, sin: Tensor, rest: Optional[Tensor]) -> Optional[tuple[str, Optional[int]]]:
    """Return the kind of pairs of a rotation, and its width if it leaves the rest of a head; None for any other sums.

    Pairs change places, and the first of them is negated.
    """
    size, width = cos.shape[1], int((cos[0] != 0).sum())
    first, half = counted(1, width), width // 2
    if width < 4 or width % 2 or not torch.equal(cos[0, :width], first) or sin[0, width:].any():
        return None
    left = torch.cat((torch.zeros_like(first), counted(width + 1, size)))
    if width < size and (rest is None or not torch.equal(rest[0].reshape(-1), left)):
        return None
    turned = {
        "half": (torch.cat((-first[half:], first[:half])), first[:half].repeat(2)),
        "interleaved": (torch.stack((-first[1::2], first[::2]), -1).reshape(-1), first[:half].repeat_interleave(2)),
    }
    for pairs, (places, entries) in turned.items():
        has_entries = any(torch.equal(cos[1, :width], table) for table in (first, entries))
        if torch.equal(sin[0, :width], places) and torch.equal(cos[1], sin[1]) and has_entries:
            return pairs, width if width < size else None
    return None


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
            return Rotation(x, rotations, rotations, "interleaved", [*nodes, real, product])
    return None


def assignments_to(node: Node) -> list[Node]:
    """Return the two assignments that fill a new tensor, if it is one."""
    return (
        sorted(user for user in node.users if operation(user) == "setitem") if operation(node) == "empty_like" else []
    )
