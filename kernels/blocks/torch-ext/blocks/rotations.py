"""Rotary embeddings by the kernels in a graph of Dynamo's, alone and together with the norms of q and k."""

from typing import Any, Optional

import torch
from torch.fx import Node

from .editing import Editor, fits, is_view, origin
from .kernel_set import rmsnorm, rope3d
from .matching import added_dimensions, dtype_of, operation, shape_of, value
from .rows import Rotation, assignments_to, rotation_in


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
    place = stores[-1] if stores else node
    is_used_later = all(user > place for user in node.users if user not in stores)
    if layout is None or value(x).stride(-1) != 1 or not is_used_later:
        return
    if not editor.may_join(rotation.nodes, place, stores):
        return
    is_heads_first, dim_of_heads = layout
    tables = _tables(editor, place, rotation, dim_of_heads)
    if tables is None:
        editor.misses.append((node, "its rotary tables are not tensors of one dtype that the kernel reads"))
        return
    if value(x).dim() == 3:
        heads = editor.insert_view(place, "unsqueeze", x, 2)
    else:
        heads = _tokens_first(editor, place, x) if is_heads_first else x
    options = {"pairs": rotation.pairs} | ({} if rotation.width is None else {"rotary_dim": rotation.width})
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


def _tables(editor: Editor, place: Node, rotation: Rotation, dim_of_heads: Optional[int]) -> Optional[list[Node]]:
    """Return the tables as the kernel takes them; None if it cannot."""
    is_complex = value(rotation.cos).is_complex()
    parts = (torch.real, torch.imag) if is_complex else (None, None)
    tables = [_table(editor, place, *of, dim_of_heads) for of in zip((rotation.cos, rotation.sin), parts)]
    return tables if all(map(fits, tables)) and dtype_of(tables[0]) == dtype_of(tables[1]) else None


def _table(editor: Editor, place: Node, table: Node, part: Any, dim: Optional[int]) -> Node:
    """Return a table, or a part of it, without a dimension; rows have adjacent elements: kernels read others slowly.

    Copies and views stand behind the table, and serve all rotations by it, if nothing writes to a tensor until then.
    """
    before = table.next if table.op != "placeholder" and editor.may_join([table], place) else place
    known = editor.copies.get((table, part, dim))
    if known is not None and before is not place:
        return known
    node = table
    if part is not None:
        node = editor.insert_view(before, part, table)
    if value(node).stride(-1) != 1:
        node = editor.insert_view(before, "contiguous", node)
    if dim is not None:
        node = editor.insert_view(before, "squeeze", node, dim)
    if before is not place:
        editor.copies[table, part, dim] = node
    return node


def _tokens_first(editor: Editor, before: Node, x: Any) -> Any:
    """Return `x.transpose(1, 2)`: heads stay where they are in memory."""
    swaps = operation(x) == "transpose" and {*x.args[1:]} == {1, 2}
    if swaps or (operation(x) == "permute" and x.args[1:] in ((0, 2, 1, 3), ((0, 2, 1, 3),))):
        return x.args[0]
    return editor.insert_view(before, "transpose", x, 1, 2)


def _layout(shape: tuple[Any, ...], table: tuple[Any, ...]) -> Optional[tuple[bool, Optional[int]]]:
    """Return whether heads precede tokens in x, and the dimension of a table for the heads, or None if it has none."""
    if len(table) > len(shape) or len(table) < 2:
        return None
    missing = len(shape) - len(table)
    full = (1,) * missing + table
    if full[0] not in (1, shape[0]):
        return None
    if len(shape) == 3:
        return (False, None) if full[1] == shape[1] else None
    for heads, tokens in ((1, 2), (2, 1)):
        if full[heads] == 1 and full[tokens] == shape[tokens] and (heads == 1 or len(table) > 2):
            return heads == 1, heads - missing if heads >= missing else None
    return None


# --- q and k together -------------------------------------------------------------------------------------------------


def rotate_together(editor: Editor, node: Node) -> None:
    """Rotate q and k in one call, together with their norms."""
    if node.target is not rope3d.apply_rotary or node.args[1] is not None:
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
    while operation(table) in ("squeeze", "unsqueeze", "contiguous", "cast", "transfer"):
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
