"""Rotary embeddings by the kernels in a graph of Dynamo's, recognized by the numbers that they compute.

The operations that lead from a value to a candidate for its rotation run on one row of random numbers, as the tables of
cosines and sines are. The result is that of the formula for a rotation, however the operations are spelled.
"""

import contextlib
import itertools
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .editing import Editor, fits, is_part, is_view, origin, shares_memory
from .kernel_set import rmsnorm, rope3d
from .matching import WIDE, dtype_of, is_tensor, operation, shape_of, unwidened, value, walk

_SHAPES = {"view", "reshape", "flatten", "unflatten"}
_PARTS = {"getitem", "unbind", "chunk", "split", "cast", "contiguous", "clone", "view_as_complex"}
_FOLLOWED = _PARTS - {"cast"} | {"cat", "stack", "add", "sub", "neg", "view_as_real"}
_JOINTS = {"add", "sub", "cat", "stack", "view_as_real"}
_STEPS = 16  # from the result of a rotation to its products
_MOST = 100  # nodes of a rotation, some of them twice
_PAIRS = [(Ellipsis, slice(0, None, 2)), (Ellipsis, slice(1, None, 2))]
_numbers = torch.Generator("cpu").manual_seed(0)


class _Unknown(Exception):
    """Other operations, or operations along other dimensions, are involved."""


class _Rows:
    """Runs the operations from a value to a result on one row of it: each of the leading dimensions has one element."""

    def __init__(self, x: Node) -> None:
        self._x, self._leading = x, value(x).dim() - 1
        self.row = _random(int(shape_of(x)[-1]))
        self.tables: dict[Node, Tensor] = {}  # by value: the row of a tensor that elements are multiplied by
        self.nodes: list[Node] = []  # that have run

    def run(self, node: Any) -> Any:
        """Return the row of a node, or its rows. Raise `_Unknown` if there is none."""
        inner = unwidened(node)
        self.nodes += [part for part in (node, inner) if isinstance(part, Node)]
        if inner is self._x:
            return self.row.view(*[1] * self._leading, -1)
        name, stores = operation(inner), assignments_to(inner)
        is_later = stores or (name and inner > self._x)  # as all nodes that depend on x
        if not is_later or len(self.nodes) > _MOST:
            raise _Unknown
        if [store.args[1] for store in stores] == _PAIRS:
            return torch.stack([self.run(store.args[2]) for store in stores], -1).flatten(-2)
        if name == "mul" and len(inner.args) == 2:
            return self._product(*inner.args)
        if name == "cast" and dtype_of(inner.args[0]) in WIDE and operation(inner.args[0]) in ("add", "sub"):
            return self.run(inner.args[0])  # it rounds a sum
        if name in _SHAPES and shape_of(inner)[: self._leading] == shape_of(inner.args[0])[: self._leading]:
            given, shape = self.run(inner.args[0]), shape_of(inner)[self._leading :]
            if all(type(size) is int for size in shape):
                return given.reshape(*[1] * self._leading, *shape)
        if name in _FOLLOWED:
            args, kwargs = map_arg(inner.args, self.run), map_arg(inner.kwargs, self.run)
            call = getattr(args[0], inner.target) if inner.op == "call_method" else partial(inner.target, args[0])
            try:
                result = call(*args[1:], **kwargs)
            except (IndexError, RuntimeError):  # a part of a leading dimension
                raise _Unknown from None
            if isinstance(result, tuple) or shape_of(inner)[: self._leading] == shape_of(self._x)[: self._leading]:
                return result
        raise _Unknown

    def _product(self, first: Any, second: Any) -> Tensor:
        for given, table in ((first, second), (second, first)):
            with contextlib.suppress(_Unknown):
                row = self.run(given)
                shape = row.shape[self._leading :]
                width = tuple(size for size in shape_of(table)[-1:] if type(size) is int) if is_tensor(table) else ()
                if shape == width or (shape[1:] == (1,) and width == (2,)):  # or a column of a matrix for each pair
                    self.tables.setdefault(table, _random(*shape[:-1], *width, is_complex=value(table).is_complex()))
                    return row * self.tables[table]
        raise _Unknown


def _random(*sizes: int, is_complex: bool = False) -> Tensor:
    dtype = torch.complex128 if is_complex else torch.float64
    return torch.rand(sizes, generator=_numbers, dtype=dtype, device="cpu")


def _rotation_of(editor: Editor, node: Node) -> Any:
    """Return x, tables, the kind of pairs, a width and the operations of a rotation; or None: the editor notes why."""
    is_rounded = operation(node) == "cast" and dtype_of(node.args[0]) in WIDE
    root = node.args[0] if is_rounded else node
    products: list[Node] = [*filter(is_tensor, _products_in(root))]
    has_pair = len(products) > 1 or any(value(product).is_complex() for product in products)  # a real rotation has two
    wholes = (_whole(part, shape_of(root)) for product in products if has_pair for part in product.args)
    for x in dict.fromkeys(part for part in wholes if is_tensor(part) and isinstance(shape_of(part)[-1], int)):
        rows = _Rows(x)
        with contextlib.suppress(_Unknown):
            result = rows.run(root).flatten()
            for cos, sin in (*itertools.permutations(rows.tables, 2), *zip(rows.tables, rows.tables)):
                kind = _kind_of(rows.row, rows.tables[cos], rows.tables[sin], result)
                if kind is not None:
                    kept = [part for part in (node, *rows.nodes) if part is not x and operation(part) != "empty_like"]
                    return x, cos, sin, *kind, kept
            is_matrix = any(table.dim() > 1 for table in rows.tables.values())
            reasons = "it rotates pairs as no kernel does", "it multiplies pairs by matrices that need not rotate them"
            editor.unrotated |= {node: reasons[is_matrix]} if len(rows.tables) > 1 else {}
    return None


def _products_in(root: Node) -> list[Node]:
    """Return the products that a value is joined of by a few sums and rearrangements."""

    def follow(part: Any) -> list[Any]:
        name = operation(part)
        if name == "empty_like":
            return [store.args[2] for store in assignments_to(part)]
        is_joint = name in _JOINTS or is_view(part) or (name == "cast" and dtype_of(part.args[0]) in WIDE)
        return part.all_input_nodes if is_joint else []

    return [part for part in itertools.islice(walk([root], follow), _STEPS) if operation(part) == "mul"]


def _whole(part: Any, shape: tuple[Any, ...]) -> Optional[Node]:
    """Return the value of a shape that another is a rearranged part of."""
    while isinstance(part, Node) and not (is_tensor(part) and shape_of(part) == shape):
        follows = is_view(part) or operation(part) in _PARTS
        part = part.args[0] if follows and part.args else None
    return None if part is None else unwidened(part)


def _kind_of(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor) -> Optional[tuple[str, Optional[int]]]:
    """Return the kind of pairs of a rotation, and its width if it leaves the rest of a head; None for other results."""
    if cos is sin and cos.is_complex():
        cos, sin = cos.real, cos.imag
    count = len(cos)
    if sin.shape != cos.shape or cos.dim() > 1 or cos.is_complex() or sin.is_complex() or result.shape != x.shape:
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
                if torch.allclose(result, expected, rtol=1e-12, atol=1e-12):
                    return pairs, width if width < len(x) else None
    return None


def assignments_to(node: Any) -> list[Node]:
    """Return the two assignments that fill a new tensor, if it is one."""
    users = node.users if operation(node) == "empty_like" else ()
    return sorted(user for user in users if operation(user) == "setitem")


def rotate(editor: Editor, node: Node) -> None:
    """Replace a rotation of one value."""
    found = _rotation_of(editor, node) if fits(node) and value(node).dim() in (3, 4) else None
    if found is None or not fits(found[0], dtype_of(node)) or shape_of(found[0]) != shape_of(node):
        return
    x, cos, sin, pairs, rotary_dim, nodes = found
    width, table = rotary_dim or shape_of(x)[-1], shape_of(cos)
    has_entries = table[-1:] in ((width,), (width // 2,)) and shape_of(sin) == table
    layout = _layout(shape_of(x), table) if has_entries else None
    # Without gradients, a part of a tensor is rotated where it is, if the model writes it there, as in CogVideoX.
    back = [user for user in node.users if operation(user) == "setitem" and user.args == (*x.args, node)]
    is_apart = not any(shares_memory(table, x) for table in (cos, sin))
    is_back = is_part(x) and len(back) == len(node.users) == 1 and is_apart and not torch.is_grad_enabled()
    stores = back if is_back else assignments_to(node)
    place = stores[-1] if stores else node
    may_join = editor.may_join(nodes, place, stores)
    is_used_later = all(user > place for user in node.users if user not in stores)
    if layout is None or value(x).stride(-1) != 1 or not may_join or not is_used_later:
        return
    is_heads_first, dim_of_heads = layout
    if editor.is_written(node, value(node).transpose(1, 2) if is_heads_first else value(node)):
        return
    parts = (torch.real, torch.imag) if value(cos).is_complex() else (None, None)
    tables = [_table(editor, place, *of, dim_of_heads) for of in zip((cos, sin), parts)]
    if not all(map(fits, tables)) or dtype_of(tables[0]) != dtype_of(tables[1]):
        editor.misses.append((node, "its rotary tables are not tensors of one dtype that the kernel reads"))
        return
    swaps = operation(x) in ("transpose", "permute") and x.args[1:] in ((1, 2), (2, 1), (0, 2, 1, 3), ((0, 2, 1, 3),))
    if is_heads_first:  # they stay where they are in memory
        heads = x.args[0] if swaps else editor.insert_view(place, "transpose", x, 1, 2)
    else:
        heads = x if value(x).dim() == 4 else editor.insert_view(place, "unsqueeze", x, 2)
    options = {"pairs": pairs, "rotary_dim": rotary_dim, "inplace": is_back}
    options = {name: option for name, option in options.items() if option}
    call = editor.insert(place, rope3d.apply_rotary, (heads, None, *tables), options)
    new = editor.insert_part(place, call, 0, like=heads)
    if value(x).dim() == 3:
        new = editor.insert_view(place, "squeeze", new, 2)
    elif is_heads_first:
        new = editor.insert_view(place, "transpose", new, 1, 2)
    new.meta = dict(node.meta)
    for store in reversed(stores):
        editor.erase(store)
    editor.replace(node, new)
    editor.erase_unused(new)


def _table(editor: Editor, place: Node, table: Node, part: Any, dim: Optional[int]) -> Node:
    """Return a table, or a part of it, without a dimension; rows have adjacent elements: kernels read others slowly.

    Copies and views stand behind the table, and serve all rotations by it, if nothing writes to a tensor until then.
    """
    is_early = table.op != "placeholder" and editor.may_join([table], place, editor.fills(table))
    before = table.next if is_early else place
    known = editor.copies.get((table, part, dim))
    if known is not None and before is not place:
        return known
    node = table if part is None else editor.insert_view(before, part, table)
    if value(node).stride(-1) != 1:
        node = editor.insert_view(before, "contiguous", node)
    if dim is not None:
        node = editor.insert_view(before, "squeeze", node, dim)
    if before is not place:
        editor.copies[table, part, dim] = node
    return node


def _layout(shape: tuple[Any, ...], table: tuple[Any, ...]) -> Optional[tuple[bool, Optional[int]]]:
    """Return whether heads precede tokens in x, and the dimension of a table for the heads, or None if it has none."""
    missing = len(shape) - len(table)
    full = (1,) * missing + table
    if missing < 0 or len(table) < 2 or full[0] not in (1, shape[0]):
        return None
    if len(shape) == 3:
        return (False, None) if full[1] == shape[1] else None
    for heads, tokens in ((1, 2), (2, 1)):
        if full[heads] == 1 and full[tokens] == shape[tokens] and (heads == 1 or len(table) > 2):
            return heads == 1, heads - missing if heads >= missing else None
    return None


def rotate_together(editor: Editor, node: Node) -> None:
    """Rotate q and k in one call, together with their norms."""
    if node in editor.unrotated and _products_in(node):  # else kernels have rotated its parts
        editor.misses.append((node, editor.unrotated[node]))
    if node.target is not rope3d.apply_rotary or node.args[1] is not None or "inplace" in node.kwargs:
        return
    other = _earlier(node)
    read = walk(other.users if other else (), lambda part: part.users if part < node else ())
    views = [part for part in read if part < node]  # of the first result, behind which they move
    is_alone = all(operation(part) == "getitem" or is_view(part) for part in views)
    if other is not None and is_alone and editor.may_join([other], node):
        for index, rotation in ((1, node), (0, other)):
            for part in list(rotation.users):
                part.args = (node, index)
        node.args = (other.args[0], node.args[0], *node.args[2:])
        for view in sorted(views, reverse=True):
            node.append(view)
        editor.erase_unused(other)
    _normalize(editor, node)


def _earlier(node: Node) -> Optional[Node]:
    """Return the last rotation of another value by the same tables before a rotation, if there is one."""
    x, _, *tables = node.args
    views = {tables[0], *(view for origin in tables[0].all_input_nodes for view in origin.users)}
    for other in sorted({user for view in views for user in view.users if user < node}, reverse=True):
        is_rotation = other.target is node.target and other.args[1] is None and other.kwargs == node.kwargs
        if is_rotation and all(map(_is_same_view, other.args[2:], tables)):
            sizes, others = shape_of(x), shape_of(other.args[0])
            if sizes[:2] == others[:2] and sizes[3] == others[3] and dtype_of(x) == dtype_of(other.args[0]):
                return other
    return None


def _is_same_view(table: Node, other: Node) -> bool:
    views = [(value(x).shape, value(x).stride(), value(x).storage_offset()) for x in (table, other)]
    return table is other or (shares_memory(table, other) and views[0] == views[1])


def _normalize(editor: Editor, node: Node) -> None:
    """Compute the norms of q and k in the call that rotates them."""
    given = [part for part in node.args[:2] if part is not None]
    norms = [origin(part)[0] for part in given]
    if any(norm.target is not rmsnorm.rms_norm or len(norm.users) != 1 for norm in norms):
        return
    (kind, eps, offset, rounding), *others = {(_kind(*pair), *pair[0].args[2:]) for pair in zip(norms, given)}
    if kind is None or others or not editor.may_join(norms, node):
        return
    heads = [editor.repeat_views(node, reversed(origin(part)[1]), norm.args[0]) for norm, part in zip(norms, given)]
    if any(value(part).stride(-1) != 1 for part in heads):
        return
    weights = [norm.args[1] for norm in norms]
    padding = [None] * (2 - len(heads))
    options = {"eps": eps, "offset": offset, "rounding": rounding, "norm": kind, **node.kwargs}
    args = (*heads, *padding, *weights, *padding, *node.args[2:])
    editor.replace(node, editor.insert(node, rope3d.norm_rotary, args, options))


def _kind(norm: Node, heads: Node) -> Optional[str]:
    """Return whether the unit of a norm is a head or a token; None if it is neither, or rounds unlike the kernel."""
    x, weight, _, _, rounding = norm.args
    if weight is not None and rounding == "before_weight" and dtype_of(weight) != dtype_of(x):
        return None
    width, (_, _, count, size) = shape_of(x)[-1], shape_of(heads)
    if width == size:
        return "head"
    return "token" if weight is not None and type(count) is type(size) is int and width == count * size else None
