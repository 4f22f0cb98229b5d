"""The fakes of the ops: the shapes and dtypes of their results, and the errors of the binding, for torch.compile."""

import torch

from ._ops import add_op_namespace_prefix
from .devices import refuse_cpu
from .tables import rows_of

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"rope3d: {message}")


def _shape(name, x, head_dim, heads_first):
    """Return the numbers of sequences, of tokens and of elements of a head."""
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


def check_grid(
    q,
    k,
    table,
    f,
    h,
    w,
    f_pairs,
    h_pairs,
    w_pairs,
    prefix=0,
    head_dim=0,
    in_turn=False,
    half=False,
    heads_first=False,
    inverse=False,
):
    _, tokens, dim = _check(q, k, prefix, head_dim, heads_first)
    for size in (f, h, w, f_pairs, h_pairs, w_pairs):
        _require(size >= 0, "grid must have no negative size, nor a negative number of pairs")
    rotated = 2 * (f_pairs + h_pairs + w_pairs)
    _require(rotated <= dim, f"q must have heads of at least {rotated} elements, not {dim}")
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


def check_tokens(q, k, cos, sin, rotary_dim=0, prefix=0, head_dim=0, half=False, heads_first=False, inverse=False):
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


def _fake(q, k):
    return q.new_empty(q.shape), None if k is None else k.new_empty(k.shape)


def check_adjacent(q, k):
    for argument, x in (("q", q), ("k", k)):
        adjacent = x is None or x.shape[-1] <= 1 or x.stride(-1) == 1
        _require(adjacent, f"{argument} must have adjacent elements in its last dimension to be rotated in place")


@torch.library.register_fake(add_op_namespace_prefix("rotate_grid"))
def _rotate_grid_fake(q, k, *arguments, **inverse):
    check_grid(q, k, *arguments, **inverse)
    return _fake(q, k)


@torch.library.register_fake(add_op_namespace_prefix("rotate_grid_"))
def _rotate_grid_in_place_fake(q, k, *arguments, **inverse):
    check_grid(q, k, *arguments, **inverse)
    check_adjacent(q, k)


@torch.library.register_fake(add_op_namespace_prefix("rotate_tokens"))
def _rotate_tokens_fake(q, k, *arguments, **inverse):
    check_tokens(q, k, *arguments, **inverse)
    return _fake(q, k)


@torch.library.register_fake(add_op_namespace_prefix("rotate_tokens_"))
def _rotate_tokens_in_place_fake(q, k, *arguments, **inverse):
    check_tokens(q, k, *arguments, **inverse)
    check_adjacent(q, k)


@torch.library.register_fake(add_op_namespace_prefix("grid_table"))
def _grid_table_fake(f, h, w, f_pairs, h_pairs, w_pairs, order, theta, scale, offset, device):
    _, entries = rows_of((f_pairs, h_pairs, w_pairs), order == "in_turn")
    return torch.empty(f + h + w, entries, 2, device=device)


def _check_weight(weight, name, elements, q):
    if weight is None:
        return
    _require(weight.device == q.device, f"{name} must be on the device of q")
    _require(
        weight.dim() == 1 and weight.shape[0] == elements,
        f"{name} must have shape [{elements}], not {list(weight.shape)}",
    )
    _require(weight.dtype in _TYPES, f"{name} must be float32, float16 or bfloat16")
    _require(weight.dtype in (q.dtype, torch.float32), f"{name} must have the dtype of q, or float32")


def check_norm(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    per_token=False,
    offset=0.0,
    rounded_before_weight=False,
    rotary_dim=0,
    prefix=0,
    head_dim=0,
    half=False,
    heads_first=False,
):
    check_tokens(q, k, cos, sin, rotary_dim, prefix, head_dim, half, heads_first)
    _require(k is not None or k_weight is None, "k_weight must be None without k")
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if x is None:
            continue
        _, _, elements = _shape(name, x, head_dim, heads_first)
        if per_token:
            elements = x.shape[-1] * (1 if head_dim != 0 else x.shape[1 if heads_first else 2])
        _check_weight(weight, name, elements, q)


@torch.library.register_fake(add_op_namespace_prefix("norm_rotate"))
def _norm_rotate_fake(q, k, *arguments, **options):
    check_norm(q, k, *arguments, **options)
    return _fake(q, k)


def _check_gradient(grad, name, x, x_name):
    if grad is None:
        return
    _require(x is not None, f"{name} must be None without {x_name}")
    _require(grad.device == x.device, f"{name} must be on the device of {x_name}")
    _require(grad.dtype == x.dtype, f"{name} must have the dtype of {x_name}")
    _require(grad.shape == x.shape, f"{name} must have shape {list(x.shape)}, not {list(grad.shape)}")


def _weight_gradient(wanted, weight, name, grad):
    if not wanted:
        return None
    _require(weight is not None, f"{name} must be given for its gradient")
    _require(grad is not None, f"{name} has a gradient only with that of the result")
    return weight.new_empty(weight.shape)


@torch.library.register_fake(add_op_namespace_prefix("norm_rotate_backward"))
def _norm_rotate_backward_fake(
    grad_q, grad_k, of_q_weight, of_k_weight, q, k, q_weight, k_weight, *arguments, **options
):
    check_norm(q, k, q_weight, k_weight, *arguments, **options)
    _check_gradient(grad_k, "grad_k", k, "k")
    _check_gradient(grad_q, "grad_q", q, "q")
    of_q = _weight_gradient(of_q_weight, q_weight, "q_weight", grad_q)
    of_k = _weight_gradient(of_k_weight, k_weight, "k_weight", grad_k)
    return (
        None if grad_q is None else q.new_empty(q.shape),
        None if grad_k is None else k.new_empty(k.shape),
        of_q,
        of_k,
    )


refuse_cpu("rotate_grid", "rotate_grid_", "rotate_tokens", "rotate_tokens_", "norm_rotate", "norm_rotate_backward")
