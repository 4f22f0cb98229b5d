"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from ._dispatch import _binary, _bound, below_autograd, changing, differentiable, past_dispatcher
from ._ops import add_op_namespace_prefix, ops
from .tables import AXES, Kept, PerAxis, Positions, each, grid_table, pairs_of_axes, rows_of, token_tables

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
    """Rotates the pairs of q and k by the positions of their tokens on a grid of three axes.

    Args:
        q: float32, float16 or bfloat16, laid out as `layout` says. Only the elements of a head need to be adjacent:
            other strides are read as they are.
        k: Of the dtype and layout of q; it may have fewer heads. None: there is none.
        grid: Frames, height and width; a sequence is its points, the width running fastest, after `prefix` tokens.
        widths: How many elements of a head turn by each axis, which follow one another; those beyond their sum stay.
            None: as Wan has them, `2 * (head_dim // 6)` for height and width and the rest for frames.
        order: "contiguous", with the frequencies `theta ** (-2 * i / width of the axis)` of the pairs i of each axis;
            "sections", as Qwen-VL has it: `theta ** (-2 * i / sum of widths)`, with i counted over all axes; or
            "in_turn", as LTX has it: the pairs belong to frames, height, width, frames, ..., the elements left over are
            in front and stay, and the frequencies are `pi / 2 * theta ** (i / (n - 1))`, with `n` pairs to an axis.
        theta: One number, or one for each axis.
        scale: A token at the index `i` of an axis has the position `offset + scale * i` there. One number, or one for
            each axis.
        offset: One number, or one for each axis.
        positions: Take the place of the indexes. With `grid`: for each axis, as many as it is long. Without: for each
            axis, those of all tokens after `prefix`, `[tokens]` or `[batch, tokens]`.
        pairs: "interleaved": the elements 2 i and 2 i + 1 of what turns; or "half": i and i + half of what turns.
        layout: "bshd" (batch, tokens, heads, elements), "bhsd", or "bsc" (batch, tokens, elements of all heads).
        head_dim: With the layout "bsc", the elements of a head. None: all elements of a token are one head.
        prefix: How many tokens at the start of each sequence stay.
        inplace: Whether to write to q and k themselves.

    Returns:
        Rotated q and k, contiguous; or q and k themselves, with `inplace`. None stands for k when there is none.

    The angles are computed in float64. The rotation is computed in float32 and rounded to the dtype of q once.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If an argument has a wrong value or length; the message names it.
    """
    plan = None
    # Positions of all tokens may be many; and what traces must see how a table is made.
    place = None if grid is None or is_dynamo_compiling() else _place(q)
    if place is not None:
        key = (place, grid, positions, widths, order, theta, scale, offset, prefix, head_dim, pairs, layout)
        try:
            plan = _plans.get(key)
        except TypeError:  # there are lists in it
            plan = None
        if plan is None:
            plan = _kept_plan(q, _frozen(key))
    if plan is not None:
        if inplace:
            _rotate_kept_grid_(q, k, plan[1], False)
            return q, k
        rotated = _rotate_kept_grid(q, k, plan[1], False)
    else:
        dim = q.shape[-1] if head_dim is None else head_dim
        rest = _plan(
            q.device, dim, grid, positions, widths, order, theta, scale, offset, prefix, head_dim, pairs, layout
        )
        rotate, rotate_ = (_rotate_grid, _rotate_grid_) if grid is not None else (_rotate_tokens, _rotate_tokens_)
        if inplace:
            rotate_(q, k, *rest)
            return q, k
        rotated = rotate(q, k, *rest)
    return rotated if k is not None else (rotated[0], None)


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
    """Rotates the pairs of q and k by given cosines and sines, which get no gradients.

    Args:
        q, k, pairs, layout, head_dim, prefix, inplace: As in `rope3d`.
        cos: `[tokens, n]` or `[batch, tokens, n]`, in float32, float16 or bfloat16, where n is `rotary_dim`, each
            cosine standing at both elements of its pair, or half of it, with one cosine for each pair.
        sin: Of the shape and dtype of `cos`.
        rotary_dim: How many elements of a head turn, the first ones; the others stay. None: all.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If an argument has a wrong value; the message names it.
    """
    plan = None
    if type(q) is Tensor and not is_dynamo_compiling() and not _modes():
        key = (rotary_dim, prefix, head_dim, pairs, layout)
        plan = _forms.get(key)
        if plan is None:
            plan = _kept_form(key)
    if plan is not None:
        if inplace:
            _rotate_kept_tokens_(q, k, cos, sin, plan, False)
            return q, k
        rotated = _rotate_kept_tokens(q, k, cos, sin, plan, False)
    else:
        rest = (rotary_dim or 0, prefix, *_form(pairs, layout, head_dim), False)
        if inplace:
            _rotate_tokens_(q, k, cos, sin, *rest)
            return q, k
        rotated = _rotate_tokens(q, k, cos, sin, *rest)
    return rotated if k is not None else (rotated[0], None)


# --- what operators are told -----------------------------------------------------------------------------------------

# Whether something looks at the operators that are called, to trace them, say, or to have no data: it must be told
# everything, since numbers of plans mean nothing elsewhere.
_modes = torch._C._len_torch_dispatch_stack


def _place_of(q):
    """What says on which device q is, and how many elements its last dimension has; None for what is not to be kept."""
    return (q.device, q.shape[-1]) if type(q) is Tensor and not _modes() else None


_place = _binary.place if _bound else _place_of

_kept = Kept(most_bytes=2**28)
_plans = _kept.found
_forms: dict[tuple, int] = {}
_MOST_FORMS = 1024


def _form(pairs: str, layout: str, head_dim: Optional[int]) -> tuple[int, bool, bool]:
    """head_dim, half and heads_first, as the operators have them."""
    if pairs not in ("interleaved", "half"):
        raise ValueError(f'rope3d: pairs must be "interleaved" or "half", not {pairs!r}')
    if layout not in ("bshd", "bhsd", "bsc"):
        raise ValueError(f'rope3d: layout must be "bshd", "bhsd" or "bsc", not {layout!r}')
    if head_dim is not None and (layout != "bsc" or head_dim <= 0):
        raise ValueError('rope3d: head_dim must be positive, and goes with the layout "bsc" only')
    return (head_dim or -1 if layout == "bsc" else 0), pairs == "half", layout == "bhsd"


def _plan(device, dim, grid, positions, widths, order, theta, scale, offset, prefix, head_dim, pairs, layout):
    """The arguments after q and k, of `rotate_grid`; or of `rotate_tokens`, where every token has its own positions."""
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
        return cos, sin, rotary_dim, prefix, head_dim, half, heads_first, False
    if positions is None and is_compiling():
        table = ops.grid_table(*grid, *counts, order, theta, scale, offset, device)
    else:
        axes = _indexes(grid, device) if positions is None else positions
        table = grid_table(axes, counts, order, theta, scale, offset)
    return table, *grid, *counts, prefix, head_dim, order == "in_turn", half, heads_first, False


def _indexes(grid, device):
    return [torch.arange(size, dtype=torch.float64, device=device) for size in grid]


def _kept_plan(q, key):
    """The table of a grid, and the number of the plan that has it; None where it cannot be kept, as when there are
    tensors among the positions, since tensors change."""
    _, *arguments = key
    positions, head_dim = arguments[1], arguments[8]
    if positions is not None and any(isinstance(axis, Tensor) for axis in positions):
        return None
    if key in _plans:
        return _plans[key]
    device = q.device
    if _in_capture(device) or device.type == "meta":
        return None
    with torch.inference_mode(False), torch.no_grad():
        dim = q.shape[-1] if head_dim is None else head_dim
        table, *rest = _plan(torch.device("cpu"), dim, *arguments)
        # Made on the host, since this copy waits, so that the table is there for every stream.
        table = table.to(device)
        return _kept.keep(key, table, lambda: ops.keep_grid(table, *rest[:-1]))


def _kept_form(key):
    """The number of a plan for tables that come with each call; None where there are too many."""
    rotary_dim, prefix, head_dim, pairs, layout = key
    form = (rotary_dim or 0, prefix, *_form(pairs, layout, head_dim))
    if len(_forms) >= _MOST_FORMS:
        return None
    return _forms.setdefault(key, ops.keep_tokens(*form))


def _in_capture(device):
    """Whether a CUDA graph is captured: what it makes is not there before it runs, and cannot be kept."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


# --- for torch.library -----------------------------------------------------------------------------------------------

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require(condition, message: str) -> None:
    torch._check(condition, lambda: f"rope3d: {message}")


def _shape(name, x, head_dim, heads_first):
    """Sequences, tokens, and elements of a head."""
    dims = 4 if head_dim == 0 else 3
    _require(x.dim() == dims, f"{name} must have {dims} dimensions, not {x.dim()}")
    width = x.shape[-1]
    if head_dim > 0:
        _require(width % head_dim == 0, f"{name} must have a multiple of {head_dim} elements in its last dimension")
        width = head_dim
    _require(width % 2 == 0, f"{name} must have an even number of elements in each head")
    return x.shape[0], x.shape[2 if heads_first else 1], width


def _check(q, k, prefix, head_dim, heads_first):
    _require(q.dtype in _TYPES, "q must be float32, float16 or bfloat16")
    _require(prefix >= 0, "prefix must not be negative")
    shape = _shape("q", q, head_dim, heads_first)
    if k is not None:
        _require(k.device == q.device, "k must be on the device of q")
        _require(k.dtype == q.dtype, "k must have the dtype of q")
        same = _shape("k", k, head_dim, heads_first) == shape
        _require(same, "k must have as many sequences, tokens and elements in each head as q")
    return shape


def _check_grid(q, k, table, f, h, w, f_pairs, h_pairs, w_pairs, prefix, head_dim, in_turn, half, heads_first, inverse):
    _, tokens, dim = _check(q, k, prefix, head_dim, heads_first)
    for size in (f, h, w, f_pairs, h_pairs, w_pairs):
        _require(size >= 0, "grid must have no negative size, nor a negative number of pairs")
    turning = 2 * (f_pairs + h_pairs + w_pairs)
    _require(turning <= dim, f"q must have heads of at least {turning} elements, not {dim}")
    _require(
        f * h * w + prefix == tokens,
        f"grid and prefix must have {tokens} tokens, as q has, not {f} * {h} * {w} + {prefix}",
    )
    _require(table.device == q.device, "table must be on the device of q")
    _require(table.dtype == torch.float32, "table must be float32")
    shape = list(table.shape)
    _require(len(shape) == 3 and shape[2] == 2, f"table must have shape [rows, entries, 2], not {shape}")
    _require(table.is_contiguous(), "table must be contiguous")
    _, entries = rows_of((f_pairs, h_pairs, w_pairs), in_turn)
    _require(
        shape[0] == f + h + w and shape[1] == entries,
        f"table must have shape [{f + h + w}, {entries}, 2], not {shape}",
    )


def _check_tokens(q, k, cos, sin, rotary_dim, prefix, head_dim, half, heads_first, inverse):
    batch, tokens, dim = _check(q, k, prefix, head_dim, heads_first)
    _require(cos.device == q.device, "cos must be on the device of q")
    _require(cos.dtype in _TYPES, "cos must be float32, float16 or bfloat16")
    _require(sin.device == cos.device, "sin must be on the device of cos")
    _require(sin.dtype == cos.dtype, "sin must have the dtype of cos")
    _require(sin.shape == cos.shape, f"sin must have shape {list(cos.shape)}, not {list(sin.shape)}")
    _require(cos.dim() in (2, 3), "cos must have two or three dimensions")
    if cos.dim() == 3:
        given = cos.shape[0]
        _require(given in (batch, 1), f"cos must be for one sequence or for {batch}, not {given}")
    rotary = rotary_dim if rotary_dim > 0 else dim
    _require(rotary <= dim and rotary % 2 == 0, f"rotary_dim must be even and at most {dim}, not {rotary}")
    entries = cos.shape[-1]
    _require(
        entries == rotary or 2 * entries == rotary,
        f"cos must have {rotary} or {rotary // 2} in its last dimension, not {entries}",
    )
    rows = cos.shape[-2]
    _require(rows + prefix == tokens, f"cos and prefix must have {tokens} tokens, as q has, not {rows} + {prefix}")


def _needs_gradient(q, k):
    return is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))


def _functions(rotated, rotate_, tables, again):
    """Two functions of autograd, the second in place, made of what does the same and records nothing. After q and k
    they have as many arguments that are tensors as `tables`, which get no gradients, and then others, the last of which
    is `inverse`. `again` is how to call the first of them, for its gradient."""

    def keep(ctx, arguments):
        if tables:
            ctx.save_for_backward(*arguments[:tables])
        ctx.form = arguments[tables:]
        ctx.set_materialize_grads(False)

    def turned_back(ctx, grad_q, grad_k):
        """The gradients, by the negative angles; where only one of them is there, it goes alone."""
        *form, inverse = ctx.form
        rest = (*(ctx.saved_tensors if tables else ()), *form, not inverse)
        none = (None,) * len(rest)
        if grad_q is not None:
            grad_q, turned_k = again(grad_q, grad_k, *rest)
            return grad_q, None if grad_k is None else turned_k, *none
        if grad_k is not None:
            grad_k, _ = again(grad_k, None, *rest)
        return None, grad_k, *none

    class Rotate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, *rest):
            keep(ctx, rest)
            rotated_q, rotated_k = rotated(q, k, *rest)
            if k is None and rotated_k is not None:
                ctx.mark_non_differentiable(rotated_k)
            return rotated_q, rotated_k

        @staticmethod
        def backward(ctx, grad_q, grad_k):
            return turned_back(ctx, grad_q, grad_k if ctx.needs_input_grad[1] else None)

    class RotateInPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, *rest):
            keep(ctx, rest)
            rotate_(q, k, *rest)
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
            return q, k

        @staticmethod
        def backward(ctx, grad_q, grad_k):
            return turned_back(ctx, grad_q, grad_k)

    return Rotate, RotateInPlace


def _increment_version(q, k):
    torch.autograd.graph.increment_version([x for x in (q, k) if x is not None])


def _kept_operators(name, tables):
    """Returns how to call the operator `name`, which knows a plan by its number, and the one that does the same in
    place. Autograd passes both by, so that a call without gradients needs no guard to get below it."""
    for one in (name, name + "_"):
        torch.library.impl(add_op_namespace_prefix(one), "Autograd")(torch.library.fallthrough_kernel)
    torch.library.impl(add_op_namespace_prefix(name), "ADInplaceOrView")(torch.library.fallthrough_kernel)
    rotated, change = differentiable(name), changing(name + "_", 2)

    def rotate(q, k, *rest):
        return Rotate.apply(q, k, *rest) if _needs_gradient(q, k) else rotated(q, k, *rest)

    def rotate_(q, k, *rest):
        if _needs_gradient(q, k):
            RotateInPlace.apply(q, k, *rest)
        else:
            change(q, k, *rest)

    Rotate, RotateInPlace = _functions(rotated, change, tables, rotate)
    return past_dispatcher(name, rotate), rotate_


def _traced(name, tables, check):
    """Returns how to call the operator `name`, which is told everything, and the one that does the same in place."""
    packet_ = getattr(ops, name + "_")

    def rotated(*arguments):
        with below_autograd():
            return getattr(ops, name).default(*arguments)

    def rotated_(*arguments):
        with below_autograd():
            packet_.default(*arguments)

    def again(*arguments):
        return rotate(*arguments)

    Rotate, RotateInPlace = _functions(rotated, rotated_, tables, again)
    rotate = differentiable(name, Rotate, inputs=2)

    def recorded(q, k, *rest):
        if _needs_gradient(q, k):
            RotateInPlace.apply(q, k, *rest)
        else:
            rotated_(q, k, *rest)
            _increment_version(q, k)

    torch.library.impl(add_op_namespace_prefix(name + "_"), "Autograd")(recorded)

    def rotate_(*arguments):
        (packet_ if is_compiling() else recorded)(*arguments)

    @torch.library.register_fake(add_op_namespace_prefix(name))
    def fake(q, k, *rest):
        check(q, k, *rest)
        return q.new_empty(q.shape), q.new_empty(0) if k is None else k.new_empty(k.shape)

    @torch.library.register_fake(add_op_namespace_prefix(name + "_"))
    def fake_(q, k, *rest):
        check(q, k, *rest)
        for argument, x in (("q", q), ("k", k)):
            adjacent = x is None or x.shape[-1] <= 1 or x.stride(-1) == 1
            _require(adjacent, f"{argument} must have adjacent elements in its last dimension to be rotated in place")

    return rotate, rotate_


_rotate_grid, _rotate_grid_ = _traced("rotate_grid", 1, _check_grid)
_rotate_tokens, _rotate_tokens_ = _traced("rotate_tokens", 2, _check_tokens)
_rotate_kept_grid, _rotate_kept_grid_ = _kept_operators("rotate_kept_grid", 0)
_rotate_kept_tokens, _rotate_kept_tokens_ = _kept_operators("rotate_kept_tokens", 2)


@torch.library.impl(add_op_namespace_prefix("grid_table"), "CompositeExplicitAutograd")
def _grid_table(f, h, w, f_pairs, h_pairs, w_pairs, order, theta, scale, offset, device):
    """What a trace calls for the table of a grid: it has one of its own, whatever becomes of it, made of a kept one."""
    key = (device, f, h, w, f_pairs, h_pairs, w_pairs, order, *theta, *scale, *offset)
    kept = _plans.get(key)
    if kept is not None:
        return kept[0].clone()

    def made(where):
        return grid_table(_indexes((f, h, w), where), (f_pairs, h_pairs, w_pairs), order, theta, scale, offset)

    if _in_capture(device):
        return made(device)
    with torch.inference_mode(False), torch.no_grad():
        table = made(torch.device("cpu")).to(device)
    _kept.keep(key, table)
    return table.clone()


@torch.library.register_fake(add_op_namespace_prefix("grid_table"))
def _grid_table_fake(f, h, w, f_pairs, h_pairs, w_pairs, order, theta, scale, offset, device):
    _, entries = rows_of((f_pairs, h_pairs, w_pairs), order == "in_turn")
    return torch.empty(f + h + w, entries, 2, device=device)
