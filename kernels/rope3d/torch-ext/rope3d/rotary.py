"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from collections.abc import Sequence
from typing import Optional

import torch

from ._ops import add_op_namespace_prefix, ops
from .tables import PerAxis, Positions, tables

Rotated = tuple[torch.Tensor, Optional[torch.Tensor]]


def rope3d(
    q: torch.Tensor,
    k: Optional[torch.Tensor] = None,
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
        widths: With `order="contiguous"`, how many elements of a head turn by each axis, in this order; those beyond
            their sum stay. None: as Wan has them, `2 * (head_dim // 6)` for height and width and the rest for frames.
        order: "contiguous", with the frequencies `theta ** (-2 * i / width of the axis)`; or "in_turn", as LTX has it:
            the pairs belong to frames, height, width, frames, ..., the elements left over are in front and stay, and
            the frequencies are `pi / 2 * theta ** (i / (n - 1))`, with `n` pairs to an axis.
        theta: One number, or one for each axis.
        scale: A token at the index `i` of an axis has the position `offset + scale * i` there. One number, or one for
            each axis.
        offset: One number, or one for each axis.
        positions: Take the place of the indexes. With `grid`: for each axis, as many as it is long. Without: for each
            axis, those of all tokens, `[tokens]` or `[batch, tokens]`.
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
    if order not in ("contiguous", "in_turn"):
        raise ValueError(f'rope3d: order must be "contiguous" or "in_turn", not {order!r}')
    if grid is None and positions is None:
        raise ValueError("rope3d: grid or positions must be given")
    dim = _head_dim(q, k, layout, head_dim)
    cos, sin = tables(grid, positions, dim or q.shape[-1], widths, order, theta, scale, offset, q.device)
    rows = 1
    for axis in cos:
        rows = rows * axis.shape[-2]
    tokens = q.shape[2 if layout == "bhsd" else 1]
    if rows + prefix != tokens:
        raise ValueError(f"rope3d: grid and prefix must have {tokens} tokens, as q has, not {rows} + {prefix}")
    return _rotate(q, k, cos, sin, order == "in_turn", pairs, layout, dim, inplace)


def apply_rotary(
    q: torch.Tensor,
    k: Optional[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
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
    dim = _head_dim(q, k, layout, head_dim)
    width = rotary_dim if rotary_dim is not None else dim or q.shape[-1]
    if cos.shape[-1] == width and width > 0:
        if pairs == "half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        else:
            cos, sin = cos[..., ::2], sin[..., ::2]
    elif cos.shape[-1] * 2 != width:
        raise ValueError(f"rope3d: cos must have {width} or {width // 2} in its last dimension, not {cos.shape[-1]}")
    tokens = q.shape[2 if layout == "bhsd" else 1]
    if cos.dim() < 2 or cos.shape[-2] + prefix != tokens:
        raise ValueError(f"rope3d: cos and prefix must have {tokens} tokens, as q has")
    return _rotate(q, k, [cos], [sin], False, pairs, layout, dim, inplace)


def _head_dim(q: torch.Tensor, k: Optional[torch.Tensor], layout: str, head_dim: Optional[int]) -> int:
    """The elements of a head, where a token's dimension holds several; else 0."""
    if layout not in ("bshd", "bhsd", "bsc"):
        raise ValueError(f'rope3d: layout must be "bshd", "bhsd" or "bsc", not {layout!r}')
    dims = 3 if layout == "bsc" else 4
    for name, x in (("q", q), ("k", k)):
        if x is not None and x.dim() != dims:
            raise ValueError(f'rope3d: {name} must have {dims} dimensions with the layout "{layout}", not {x.dim()}')
    if head_dim is None:
        return 0
    if layout != "bsc" or head_dim <= 0:
        raise ValueError('rope3d: head_dim must be positive, and goes with the layout "bsc" only')
    return head_dim


def _rotate(q, k, cos, sin, in_turn, pairs, layout, head_dim, inplace) -> Rotated:
    if pairs not in ("interleaved", "half"):
        raise ValueError(f'rope3d: pairs must be "interleaved" or "half", not {pairs!r}')
    arguments = (q, k, cos, sin, in_turn, pairs == "half", layout == "bhsd", head_dim, False)
    if inplace:
        ops.rotate_(*arguments)
        return q, k
    if torch.compiler.is_compiling() or _needs_gradient(q, k):
        rotated_q, rotated_k = ops.rotate(*arguments)
    else:
        # Past the function that would find out the same once more, for twice the cost of the call.
        with torch._C._AutoDispatchBelowAutograd():
            rotated_q, rotated_k = _rotate_operator(*arguments)
    return rotated_q, None if k is None else rotated_k


_rotate_operator = ops.rotate.default


def _needs_gradient(q, k) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))


def _require(condition, message: str) -> None:
    torch._check(condition, lambda: f"rope3d: {message}")


_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def _checked_shape(name, x, heads_first, head_dim):
    """Sequences, tokens, and elements of a head."""
    dims = "four dimensions" if heads_first else "three or four dimensions"
    _require(x.dim() == 4 or (x.dim() == 3 and not heads_first), f"{name} must have {dims}")
    width = x.shape[-1]
    if x.dim() == 3 and head_dim > 0:
        _require(width % head_dim == 0, f"{name} must have a multiple of {head_dim} elements in its last dimension")
        width = head_dim
    _require(width % 2 == 0, f"{name} must have an even number of elements in each head")
    return x.shape[0], x.shape[2 if heads_first else 1], width


def _check(q, k, cos, sin, in_turn, heads_first, head_dim) -> None:
    _require(q.dtype in _TYPES, "q must be float32, float16 or bfloat16")
    batch, tokens, width = _checked_shape("q", q, heads_first, head_dim)
    if k is not None:
        _require(k.device == q.device, "k must be on the device of q")
        _require(k.dtype == q.dtype, "k must have the dtype of q")
        same = _checked_shape("k", k, heads_first, head_dim) == (batch, tokens, width)
        _require(same, "k must have as many sequences, tokens and elements in each head as q")
    _require(len(cos) in (1, 3), "cos must be one table or three")
    _require(len(sin) == len(cos), "sin must be as many tables as cos")
    pairs, rows = 0, 1
    for c, s in zip(cos, sin):
        _require(c.device == q.device, "cos must be on the device of q")
        _require(c.dtype in _TYPES, "cos must be float32, float16 or bfloat16")
        _require(s.device == c.device, "sin must be on the device of cos")
        _require(s.dtype == c.dtype, "sin must have the dtype of cos")
        _require(s.shape == c.shape, f"sin must have shape {list(c.shape)}, not {list(s.shape)}")
        _require(c.dim() in (2, 3), "cos must have two or three dimensions")
        if c.dim() == 3:
            given = c.shape[0]
            _require(given in (batch, 1), f"cos must be for one sequence or for {batch}, not {given}")
        _require(c.dtype == cos[0].dtype, "cos must be tables of one dtype")
        if in_turn:
            _require(c.shape[-1] == cos[0].shape[-1], "cos must be tables of one width to be taken in turn")
        pairs = pairs + c.shape[-1]
        rows = rows * c.shape[-2]
    _require(2 * pairs <= width, f"cos must have at most {width // 2} pairs, not {pairs}")
    _require(rows <= tokens, f"cos must be for at most {tokens} tokens, not {rows}")


@torch.library.register_fake(add_op_namespace_prefix("rotate"))
def _rotate_fake(q, k, cos, sin, in_turn, half, heads_first, head_dim, inverse):
    _check(q, k, cos, sin, in_turn, heads_first, head_dim)
    return q.new_empty(q.shape), q.new_empty(0) if k is None else k.new_empty(k.shape)


@torch.library.register_fake(add_op_namespace_prefix("rotate_"))
def _rotate_in_place_fake(q, k, cos, sin, in_turn, half, heads_first, head_dim, inverse):
    _check(q, k, cos, sin, in_turn, heads_first, head_dim)
    for name, x in (("q", q), ("k", k)):
        adjacent = x is None or x.shape[-1] <= 1 or x.stride(-1) == 1
        _require(adjacent, f"{name} must have adjacent elements in its last dimension to be rotated in place")


# What `torch.library.register_autograd` would do, at less than half of its cost for each call.


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, *form):
        _keep(ctx, cos, sin, form)
        with torch._C._AutoDispatchBelowAutograd():
            rotated_q, rotated_k = ops.rotate(q, k, cos, sin, *form)
        if k is None:
            ctx.mark_non_differentiable(rotated_k)
        return rotated_q, rotated_k

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        return _turned_back(ctx, grad_q, grad_k if ctx.needs_input_grad[1] else None)


class _RotateInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, *form):
        _keep(ctx, cos, sin, form)
        with torch._C._AutoDispatchBelowAutograd():
            ops.rotate_(q, k, cos, sin, *form)
        ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        return q, k

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        return _turned_back(ctx, grad_q, grad_k)


def _keep(ctx, cos, sin, form) -> None:
    ctx.save_for_backward(*cos, *sin)
    ctx.form = form
    ctx.set_materialize_grads(False)


def _turned_back(ctx, grad_q, grad_k):
    """The gradients, by the negative angles; where only one of them is there, it goes alone."""
    tables = ctx.saved_tensors
    cos, sin = list(tables[: len(tables) // 2]), list(tables[len(tables) // 2 :])
    *form, inverse = ctx.form
    rest = (None,) * (2 + len(ctx.form))
    if grad_q is not None:
        grad_q, turned_k = ops.rotate(grad_q, grad_k, cos, sin, *form, not inverse)
        return grad_q, None if grad_k is None else turned_k, *rest
    if grad_k is not None:
        grad_k, _ = ops.rotate(grad_k, None, cos, sin, *form, not inverse)
    return None, grad_k, *rest


def _differentiable(name, function, mutable):
    operator = getattr(ops, name).default

    @torch.library.impl(add_op_namespace_prefix(name), "Autograd")
    def forward(q, k, *rest):
        if _needs_gradient(q, k):
            result = function.apply(q, k, *rest)
            return None if mutable else result
        with torch._C._AutoDispatchBelowAutograd():
            result = operator(q, k, *rest)
        if mutable:
            torch.autograd.graph.increment_version([x for x in (q, k) if x is not None])
        return result


_differentiable("rotate", _Rotate, mutable=False)
_differentiable("rotate_", _RotateInPlace, mutable=True)
