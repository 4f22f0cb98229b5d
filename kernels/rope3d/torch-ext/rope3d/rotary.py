"""The public functions, their table arguments, and the gradients of their ops."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.nn import Parameter

from ._ops import add_op_namespace_prefix, ops
from .derivatives import FORWARD_AD, LEVEL, check_types, is_transformed
from .formulas import rotate_grid, rotate_tokens
from .tables import AXES, Kept, PerAxis, Positions, each, grid_table, pairs_of_axes, token_tables

Rotated = tuple[Tensor, Optional[Tensor]]


def rope3d(
    q: Tensor,
    k: Optional[Tensor] = None,
    grid: Optional[Sequence[int]] = None,
    *,
    widths: Optional[Sequence[int]] = None,
    order: str = "contiguous",
    theta: PerAxis = 10000.0,
    scale: PerAxis = 1.0,
    offset: PerAxis = 0.0,
    positions: Optional[Positions] = None,
    pairs: str = "interleaved",
    layout: str = "bshd",
    head_dim: Optional[int] = None,
    prefix: int = 0,
    inplace: bool = False,
) -> Rotated:
    """Rotate the pairs of q and k by the positions of their tokens on a grid of three axes.

    Args:
        q: float32, float16 or bfloat16, in the order of dimensions that `layout` names. The elements of a head must be
            adjacent to be read in place; the other dimensions may have any strides.
        k: Of the dtype and layout of q; it may have fewer heads. None: no k.
        grid: Frames, height and width. The tokens of a sequence are `prefix` tokens and then the points of the grid, in
            row-major order: the width index changes fastest.
        widths: The number of elements of a head that each axis rotates, in the order of the axes; elements beyond their
            sum are not rotated. None: as in Wan, `2 * (head_dim // 6)` for height and width and the rest for frames.
        order: How pairs and frequencies are given to the axes. `"contiguous"`: the pairs of an axis are adjacent; pair
            i has the frequency `theta ** (-2 * i / width of the axis)`. `"sections"`, as in Qwen-VL: adjacent, with
            `theta ** (-2 * i / sum of widths)`, where i counts over all axes. `"in_turn"`, as in LTX: the pairs belong
            to frames, height, width, frames, ...; elements left over come first and are not rotated; pair i of the `n`
            of an axis has the frequency `pi / 2 * theta ** (i / (n - 1))`.
        theta: The base of the frequencies. One number, or one for each axis.
        scale: The position of a token is `offset + scale * index` on each axis. One number, or one for each axis.
        offset: One number, or one for each axis.
        positions: Replace the indexes. With `grid`: one sequence for each axis, as long as the axis. Without: for each
            axis the positions of all tokens after `prefix`, `[tokens]` or `[batch, tokens]`.
        pairs: `"interleaved"` pairs the rotated elements 2 i and 2 i + 1, `"half"` i and i + half their number.
        layout: `"bshd"` (batch, tokens, heads, elements), `"bhsd"`, or `"bsc"` (batch, tokens, elements of all heads).
        head_dim: The elements of a head, with the layout `"bsc"`. None: all elements of a token are one head.
        prefix: The number of tokens at the start of each sequence that are not rotated.
        inplace: Whether to write the results over q and k, which must not share memory. If one of them needs a
            gradient, the results are copied there, with the rules of Torch's operations in place: for example, a leaf
            and a result of `unbind` are refused.

    Returns:
        Rotated q and k, contiguous; or q and k themselves if `inplace`. None in place of k if there is no k.

    The angles are computed in float64. The rotation is computed in float32 and rounded to the dtype of q once.

    Raises:
        TypeError: If an argument has a wrong type; the message names it.
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If an argument has a wrong value or length; the message names it.
    """
    try:
        arguments = None
        axes = (grid, positions, widths, order, theta, scale, offset)
        key = (q.device, q.shape[-1], *axes, prefix, head_dim, pairs, layout)
        # A subclass, such as a fake tensor, must not get a kept table. Neither must a trace, which has to see how the
        # table is made.
        if grid is not None and type(q) is Tensor and not is_compiling():
            try:
                arguments = _kept.entries.get(key)
            except TypeError:  # the key contains lists
                arguments = None
            if arguments is None:
                arguments = _keep_arguments(key)
        if arguments is None:
            arguments = _arguments(*key)
        return _rotate(_TOKENS if grid is None else _GRID, q, k, *arguments, inplace)
    except Exception:
        check_types(rope3d, locals())
        raise


def apply_rotary(
    q: Tensor,
    k: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    pairs: str = "interleaved",
    layout: str = "bshd",
    head_dim: Optional[int] = None,
    rotary_dim: Optional[int] = None,
    prefix: int = 0,
    inplace: bool = False,
) -> Rotated:
    """Rotate the pairs of q and k by given cosines and sines.

    Args:
        q, k, pairs, layout, head_dim, prefix, inplace: As in `rope3d`.
        cos: `[tokens, n]` or `[batch, tokens, n]`, float32, float16 or bfloat16. n is half of `rotary_dim`, with one
            entry for each pair, or `rotary_dim`, with one for each element.
        sin: Of the shape and dtype of `cos`. If one of them needs a gradient, Torch operations compute the rotation.
        rotary_dim: The number of elements of a head to rotate, the first ones. None: all.

    A pair (a, b) becomes `(a * cos_a - b * sin_a, b * cos_b + a * sin_b)`, in float32, rounded once. With one entry for
    each pair, `cos_a` is `cos_b` and `sin_a` is `sin_b`.

    Raises:
        TypeError, RuntimeError, ValueError: As `rope3d`.
    """
    try:
        options = _unless_default(rotary_dim or 0, prefix, *_form(pairs, layout, head_dim))
        return _rotate(_TOKENS, q, k, (cos, sin), options, inplace)
    except Exception:
        check_types(apply_rotary, locals())
        raise


# Each op with its in-place counterpart and its formula.
_GRID = ops.rotate_grid.default, ops.rotate_grid_.default, rotate_grid
_TOKENS = ops.rotate_tokens.default, ops.rotate_tokens_.default, rotate_tokens


# --- arguments of the ops after q and k ------------------------------------------------------------------------------

_kept = Kept(most_bytes=2**28)


def is_second(value: str, name: str, first: str, second: str) -> bool:
    """Return whether an argument has the second of its two values."""
    if value not in (first, second):
        raise ValueError(f'rope3d: {name} must be "{first}" or "{second}", not {value!r}')
    return value == second


def _form(pairs: str, layout: str, head_dim: Optional[int]) -> tuple[int, bool, bool]:
    """Return the ops' arguments head_dim, half and heads_first."""
    half = is_second(pairs, "pairs", "interleaved", "half")
    if layout not in ("bshd", "bhsd", "bsc"):
        raise ValueError(f'rope3d: layout must be "bshd", "bhsd" or "bsc", not {layout!r}')
    if head_dim is not None and (layout != "bsc" or head_dim <= 0):
        raise ValueError('rope3d: head_dim must be positive, and goes with the layout "bsc" only')
    return (head_dim or -1 if layout == "bsc" else 0), half, layout == "bhsd"


def _arguments(device, width, grid, positions, widths, order, theta, scale, offset, prefix, head_dim, pairs, layout):
    """Return the tables and the options of `rotate_grid`; without a grid, those of `rotate_tokens`."""
    dim = width if head_dim is None else head_dim
    head_dim, half, heads_first = _form(pairs, layout, head_dim)
    counts = pairs_of_axes(dim, widths, order)
    if grid is None and positions is None:
        raise ValueError("rope3d: grid or positions must be given")
    if grid is not None and len(grid) != AXES:
        raise ValueError(f"rope3d: grid must have {AXES} sizes, not {len(grid)}")
    theta, scale, offset = each(theta, "theta"), each(scale, "scale"), each(offset, "offset")
    if positions is not None:
        if len(positions) != AXES:
            raise ValueError(f"rope3d: positions must be given for {AXES} axes, not {len(positions)}")
        positions = [torch.as_tensor(p, dtype=torch.float64, device=device) for p in positions]
        if grid is not None and any(axis.shape != (size,) for axis, size in zip(positions, grid)):
            raise ValueError("rope3d: positions must be as many as grid has on each axis")
    if grid is None:
        cos, sin, rotary_dim = token_tables(positions, dim, counts, order, theta, scale, offset)
        return (cos, sin), _unless_default(rotary_dim, prefix, head_dim, half, heads_first)
    if positions is None and is_compiling():
        table = ops.grid_table(*grid, *counts, order, theta, scale, offset, device)
    else:
        axes = _indexes(grid, device) if positions is None else positions
        table = grid_table(axes, counts, order, theta, scale, offset)
    return (table,), (*grid, *counts, *_unless_default(prefix, head_dim, order == "in_turn", half, heads_first))


def _unless_default(*options):
    """Return the last options of an op but `inverse`, or nothing if all have their default values, 0 and False."""
    return options if any(options) else ()


def _indexes(grid, device):
    return [torch.arange(size, dtype=torch.float64, device=device) for size in grid]


def _keep_arguments(key):
    """Return the table and the options of `rotate_grid`, kept for later calls; None if they cannot be kept."""
    try:
        key = _frozen(key)
        if key in _kept.entries:
            return _kept.entries[key]
    except TypeError:
        return None
    device, width, grid, positions, *rest = key
    if _in_capture(device) or device.type == "meta" or is_transformed():
        return None
    with torch.inference_mode(False), torch.no_grad():
        (table,), options = _arguments(torch.device("cpu"), width, grid, positions, *rest)
        # The copy from the host is synchronous, so any stream may read the table.
        return _kept.keep(key, table.to(device), options)


def _in_capture(device):
    """Return whether a CUDA graph is captured: a table made in it has no values before the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _frozen(value):
    """Return a value with tuples in place of lists; raise a TypeError for tensors, which may change."""
    if isinstance(value, Tensor):
        raise TypeError
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@torch.library.impl(add_op_namespace_prefix("grid_table"), "CompositeExplicitAutograd")
def _grid_table(f, h, w, f_pairs, h_pairs, w_pairs, order, theta, scale, offset, device):
    """Return the table of a grid to a compiled graph: a copy of a kept one, because the graph owns the result."""
    key = (device, f, h, w, f_pairs, h_pairs, w_pairs, order, *theta, *scale, *offset)
    kept = _kept.entries.get(key)
    if kept is not None:
        return kept[0][0].clone()

    def made(where):
        return grid_table(_indexes((f, h, w), where), (f_pairs, h_pairs, w_pairs), order, theta, scale, offset)

    if _in_capture(device):
        return made(device)
    with torch.inference_mode(False), torch.no_grad():
        table = made(torch.device("cpu")).to(device)
    _kept.keep(key, table)
    return table.clone()


# --- gradients -------------------------------------------------------------------------------------------------------


def _rotate(ops_, q, k, tables, options, inplace, inverse=False):
    grad_enabled = is_grad_enabled()
    try:
        if FORWARD_AD[LEVEL] < 0 and not (
            grad_enabled and (tables[0].requires_grad or tables[-1].requires_grad)  # no kernel has their gradients
        ):
            if grad_enabled and (q.requires_grad or (k is not None and k.requires_grad)):
                # Tables and options go as tuples: each argument of `apply` costs the host time, forward and backward.
                rotated = _Rotate.apply(q, k, ops_, tables, options, inverse)
                return _copied(rotated, q, k) if inplace else rotated
            if inplace:
                ops_[1](q, k, *tables, *options)
                # The dispatcher does not do this for an op that autograd does not know.
                increment_version((q,) if k is None else (q, k))
                return q, k
            if inverse:
                return ops_[0](q, k, *tables, *options, inverse=True)
            return ops_[0](q, k, *tables, *options)
    except RuntimeError:
        if not is_transformed():
            raise
    rotated = ops_[2](q, k, *tables, *options, inverse=inverse)
    return _copied(rotated, q, k) if inplace else rotated


def _copied(rotated, q, k):
    """Copy the results over q and k, so that autograd sees the writes. All errors come before the first one."""
    given = {"q": q} if k is None else {"q": q, "k": k}
    if type(q) in (Tensor, Parameter) and not is_compiling() and not is_transformed():
        for name, x in given.items():
            if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride())):
                raise RuntimeError(f"rope3d: {name} must not be expanded, to be changed in place")
            x[:0].zero_()  # autograd refuses leaves, and views from a function that returns several
        if k is not None and (_starts_within(q, k) or _starts_within(k, q)):
            raise RuntimeError("rope3d: k must not be q, nor share memory with it")
    for x, result in zip(given.values(), rotated):
        x.copy_(result)
    return q, k


def _starts_within(inner, outer):
    """Return whether an element of `outer` has the address of the first one of `inner`, as kit/tensors.h finds it."""
    distance = (inner.data_ptr() - outer.data_ptr()) // outer.element_size()
    for stride, size in sorted(zip(outer.stride(), outer.shape), reverse=True):
        distance -= min(max(distance, 0) // max(stride, 1), size - 1) * stride
    return distance == 0 and inner.numel() > 0 and outer.numel() > 0


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, ops_, tables, options, inverse):
        ctx.save_for_backward(*tables)
        ctx.arguments = ops_, options, inverse
        ctx.set_materialize_grads(False)
        if inverse:
            return ops_[0](q, k, *tables, *options, inverse=True)
        return ops_[0](q, k, *tables, *options)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        """Rotate the gradients of q and k by the negative angles."""
        ops_, options, inverse = ctx.arguments
        if grad_q is not None:
            grads = _rotate(ops_, grad_q, grad_k, ctx.saved_tensors, options, False, not inverse)
        elif grad_k is not None:
            grads = None, _rotate(ops_, grad_k, None, ctx.saved_tensors, options, False, not inverse)[0]
        else:
            grads = None, None
        return *grads, None, None, None, None
