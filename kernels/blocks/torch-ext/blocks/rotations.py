"""Rotary embeddings by the kernels in a graph of Dynamo's, alone and together with the norms of q and k."""

from typing import Any, NamedTuple, Optional

import torch
from torch.fx import Node

from .editing import Editor, fits, is_view, origin
from .kernel_set import rmsnorm, rope3d
from .rows import Rotation, assignments_to, rotation_in
from .values import (
    added_dimensions,
    dtype_of,
    operation,
    shape_of,
    value,
)


def rotate(editor: Editor, node: Node) -> None:
    """Replace a rotation of one value."""
    if not fits(node) or value(node).dim() not in (3, 4):
        return
    rotation = rotation_in(node)
    if rotation is None or not fits(rotation.x, dtype_of(node)) or shape_of(rotation.x) != shape_of(node):
        return
    x = rotation.x
    width, table = rotation.width or shape_of(x)[-1], shape_of(rotation.cos)
    has_entries = table[-1:] in ((width,), (width // 2,)) and shape_of(rotation.sin) == table
    layout = _layout(shape_of(x), table) if has_entries else None
    stores = assignments_to(node)
    place = stores[-1] if stores else _assignment(node, x) or node
    is_used_later = all(user > place for user in node.users if user not in (*stores, place))
    if (
        layout is None
        or value(x).stride(-1) != 1
        or not is_used_later
        or not editor.may_join(rotation.nodes, place, stores)
    ):
        return
    tables = _tables(editor, place, rotation, layout)
    if tables is None:
        editor.misses.append((node, "its rotary tables are not tensors of one dtype that the kernel reads"))
        return
    if value(x).dim() == 3:
        heads = editor.insert_view(place, "unsqueeze", x, 2)
    else:
        heads = _tokens_first(editor, place, x) if layout.is_heads_first else x
    options: dict[str, Any] = {"pairs": rotation.pairs}
    if rotation.width is not None:
        options["rotary_dim"] = rotation.width
    if place is not node and not stores:
        editor.insert(place, rope3d.apply_rotary, (heads, None, *tables), {**options, "inplace": True})
        editor.erase(place)
        editor.erase_unused(node)
        return
    call = editor.insert(place, rope3d.apply_rotary, (heads, None, *tables), options)
    new = editor.insert_part(place, call, 0, like=heads)
    if value(x).dim() == 3:
        new = editor.insert_view(place, "squeeze", new, 2)
    elif layout.is_heads_first:
        new = editor.insert_view(place, "transpose", new, 1, 2)
    new.meta = dict(node.meta)
    for store in reversed(stores):
        editor.erase(store)
    editor.replace(node, new)


def _assignment(node: Node, x: Node) -> Optional[Node]:
    """Return the assignment `base[part] = node` if `x` is `base[part]`, and no gradient is needed."""
    if len(node.users) != 1 or (torch.is_grad_enabled() and value(x).requires_grad):
        return None
    (user,) = node.users
    is_part = operation(user) == "setitem" and operation(x) == "getitem"
    return user if is_part and user.args[:2] == x.args else None


def _tables(editor: Editor, place: Node, rotation: Rotation, layout: "_Layout") -> Optional[list[Node]]:
    """Return the tables as the kernel takes them; None if it cannot."""
    tables = []
    for given, part in ((rotation.cos, torch.real), (rotation.sin, torch.imag)):
        table = _adjacent(editor, place, given, part if value(given).is_complex() else None)
        if not fits(table):
            return None
        tables.append(_without_dimension(editor, place, table, layout.dim_of_heads))
    return tables if dtype_of(tables[0]) == dtype_of(tables[1]) else None


def _adjacent(editor: Editor, place: Node, table: Node, part: Any) -> Node:
    """Return a table, or a part of it, whose rows have adjacent elements: the kernels read others slowly.

    A copy stands behind the table, and serves all rotations by it, if nothing writes to a tensor until then.
    """
    if part is None and value(table).stride(-1) == 1:
        return table
    before = table.next if table.op != "placeholder" and editor.may_join([table], place) else place
    known = editor.copies.get((table, part))
    if known is not None and before is not place:
        return known
    node = table
    if part is not None:
        node = editor.insert(before, part, (table,))
        node.meta["example_value"] = part(value(table))
    if value(node).stride(-1) != 1:
        node = editor.insert_view(before, "contiguous", node)
    if before is not place:
        editor.copies[table, part] = node
    return node


def _tokens_first(editor: Editor, before: Node, x: Any) -> Any:
    """Return `x.transpose(1, 2)`: heads stay where they are in memory."""
    swaps = operation(x) == "transpose" and {*x.args[1:]} == {1, 2}
    if swaps or (operation(x) == "permute" and x.args[1:] in ((0, 2, 1, 3), ((0, 2, 1, 3),))):
        return x.args[0]
    return editor.insert_view(before, "transpose", x, 1, 2)


def _without_dimension(editor: Editor, before: Node, table: Node, dim: Optional[int]) -> Node:
    if dim is None:
        return table
    *_, inner = added_dimensions(table)
    shape = shape_of(table)
    if inner is not table and shape_of(inner) in (
        (*shape[:dim], *shape[dim + 1 :]),
        shape[dim + 1 :] if shape[0] == 1 else (),
    ):
        return inner
    return editor.insert_view(before, "squeeze", table, dim)


class _Layout(NamedTuple):
    """The dimension of a table that stands for the heads, if it has one, and whether heads precede tokens in x."""

    dim_of_heads: Optional[int]
    is_heads_first: bool


def _layout(shape: tuple[Any, ...], table: tuple[Any, ...]) -> Optional[_Layout]:
    if len(table) > len(shape) or len(table) < 2:
        return None
    full = (1,) * (len(shape) - len(table)) + table
    if full[0] not in (1, shape[0]):
        return None
    if len(shape) == 3:
        return _Layout(None, False) if full[1] == shape[1] else None
    for heads, tokens in ((1, 2), (2, 1)):
        if full[heads] == 1 and full[tokens] == shape[tokens] and (heads == 1 or len(table) > 2):
            dim = heads - (len(shape) - len(table))
            return _Layout(dim if dim >= 0 else None, heads == 1)
    return None


# --- q and k together -------------------------------------------------------------------------------------------------


def rotate_together(editor: Editor, node: Node) -> None:
    """Rotate q and k in one call, together with their norms."""
    if node.target is not rope3d.apply_rotary or node.args[1] is not None or "inplace" in node.kwargs:
        return
    other = _earlier(node)
    if other is not None:
        views = _views_after(other, node)
        if views is not None and editor.may_join([other], node):
            _join(editor, other, node, views)
    _normalize(editor, node)


def _earlier(node: Node) -> Optional[Node]:
    """Return the rotation of another value by the same tables, if there is one a little before."""
    x, _, cos, sin = node.args
    other, distance = node.prev, 0
    while other.op in ("call_method", "call_function") and distance < 40:
        if other.target is node.target and other.args[1] is None and other.kwargs == node.kwargs:
            is_same = all(
                _root(a) is _root(b) and shape_of(a) == shape_of(b) for a, b in zip(other.args[2:], (cos, sin))
            )
            sizes, others = shape_of(x), shape_of(other.args[0])
            if is_same and sizes[:2] == others[:2] and sizes[3] == others[3] and dtype_of(x) == dtype_of(other.args[0]):
                return other
        other, distance = other.prev, distance + 1
    return None


def _root(table: Any) -> Any:
    """Return the value of which a table is the same view or cast as another node may be."""
    while operation(table) in ("squeeze", "unsqueeze", "cast", "transfer"):
        table = table.args[0]
    *_, table = added_dimensions(table)
    return table


def _views_after(first: Node, place: Node) -> Optional[list[Node]]:
    """Return the views of a rotation's result that are made before `place`; None if anything else reads it there."""
    views, pending = [], list(first.users)
    while pending:
        node = pending.pop()
        if node < place:
            if operation(node) != "getitem" and not is_view(node):
                return None
            views.append(node)
            pending += node.users
    return views


def _join(editor: Editor, first: Node, second: Node, views: list[Node]) -> None:
    """Let the second of two rotations do both."""
    for part in list(second.users):
        part.args = (second, 1)
    for part in list(first.users):
        part.args = (second, 0)
    second.args = (first.args[0], second.args[0], *second.args[2:])
    editor.move(views, second.next)
    editor.erase_unused(first)


def _normalize(editor: Editor, node: Node) -> None:
    """Compute the norms of q and k in the call that rotates them."""
    given = [part for part in node.args[:2] if part is not None]
    norms = [origin(part)[0] for part in given]
    if any(norm.target is not rmsnorm.rms_norm or len(norm.users) != 1 for norm in norms):
        return
    if any(norm.args[2:] != norms[0].args[2:] for norm in norms):
        return
    kinds = {_kind(norm, heads) for norm, heads in zip(norms, given)}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind is None or not editor.may_join(norms, node):
        return
    heads = [editor.repeat_views(node, reversed(origin(part)[1]), norm.args[0]) for norm, part in zip(norms, given)]
    if any(value(part).stride(-1) != 1 for part in heads):
        return
    weights = [norm.args[1] for norm in norms]
    padding = [None] * (2 - len(heads))
    eps, offset, rounding = norms[0].args[2:]
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
    return "token" if weight is not None and width == count * size else None
