"""The ops in Torch operations, for the derivatives that have no kernel, and their fakes, for torch.compile."""

import torch
from torch.nn.functional import pad

from ._ops import add_op_namespace_prefix
from .derivatives import refuse_negated, transform_with
from .devices import refuse_cpu
from .tables import rows_of


def rotate_grid(
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
    grid, pairs = (f, h, w), (f_pairs, h_pairs, w_pairs)
    starts, _ = rows_of(pairs, in_turn)
    axes = []
    for axis, rows in enumerate(table.split(grid)):
        entries = rows[:, starts[axis] : starts[axis] + pairs[axis]]
        axes.append(entries.reshape([-1 if other == axis else 1 for other in range(3)] + [pairs[axis], 2]))
    axes = [entries.expand(*grid, -1, 2) for entries in axes]
    turns = torch.stack(axes, -2).flatten(-3, -2) if in_turn else torch.cat(axes, -2)
    cos, sin = turns.flatten(0, 2).unbind(-1)
    if in_turn:  # the elements left over come first
        left_over = _heads(q, head_dim, heads_first).shape[-1] // 2 - sum(pairs)
        cos, sin = pad(cos, (left_over, 0), value=1.0), pad(sin, (left_over, 0))
    form = (2 * cos.shape[-1], prefix, head_dim, half, heads_first, inverse)
    return _rotated(q, cos, sin, *form), _rotated(k, cos, sin, *form)


def rotate_tokens(q, k, cos, sin, rotary_dim=0, prefix=0, head_dim=0, half=False, heads_first=False, inverse=False):
    rotary_dim = rotary_dim or _heads(q, head_dim, heads_first).shape[-1]
    form = (rotary_dim, prefix, head_dim, half, heads_first, inverse)
    return _rotated(q, cos, sin, *form), _rotated(k, cos, sin, *form)


def norm_rotate(
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
    form = (rotary_dim, prefix, head_dim, half, heads_first)
    norm = (eps, per_token, offset, rounded_before_weight, head_dim, heads_first)
    q, k = (x if x is None else _normed(x, weight, *norm) for x, weight in ((q, q_weight), (k, k_weight)))
    return rotate_tokens(q, k, cos, sin, *form)


def _in_place(formula):
    """Return a formula that writes the results over q and k."""

    def formula_in_place(q, k, *arguments, **inverse):
        for x, rotated in zip((q, k), formula(q, k, *arguments, **inverse)):
            if x is not None:
                x.copy_(rotated)

    return formula_in_place


def _heads(x, head_dim, heads_first):
    """Return a view `[batch, tokens, heads, elements]`."""
    if head_dim != 0:
        return x.unflatten(-1, (-1, head_dim if head_dim > 0 else x.shape[-1]))
    return x.transpose(1, 2) if heads_first else x


def _joined(heads, head_dim, heads_first):
    """Return `[batch, tokens, heads, elements]` in the layout from which `_heads` made it, contiguous."""
    if head_dim != 0:
        return heads.flatten(2)
    return heads.transpose(1, 2).contiguous() if heads_first else heads.contiguous()


def _rotated(x, cos, sin, rotary_dim, prefix, head_dim, half, heads_first, inverse):
    if x is None:
        return None
    heads = _heads(x, head_dim, heads_first)
    wide = heads[:, prefix:].float()
    a, b = _of_pairs(wide[..., :rotary_dim], half)
    # A table has one entry for each pair, or one for each element.
    (cos_a, cos_b), (sin_a, sin_b) = (
        (table, table) if 2 * table.shape[-1] == rotary_dim else _of_pairs(table, half)
        for table in (cos.float().unsqueeze(-2), sin.float().unsqueeze(-2))
    )
    if inverse:  # by the transposed matrix
        sin_a, sin_b = -sin_b, -sin_a
    turned = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    turned = torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)
    turned = torch.cat((turned, wide[..., rotary_dim:]), -1).to(x.dtype)
    return _joined(torch.cat((heads[:, :prefix], turned), 1), head_dim, heads_first)


def _of_pairs(elements, half):
    """Return the first and the second elements of pairs."""
    return elements.chunk(2, -1) if half else (elements[..., ::2], elements[..., 1::2])


def _normed(x, weight, eps, per_token, offset, rounded_before_weight, head_dim, heads_first):
    heads = _heads(x, head_dim, heads_first).float()
    normed = heads * torch.rsqrt(heads.square().mean((-2, -1) if per_token else -1, keepdim=True) + eps)
    if weight is not None:
        if rounded_before_weight:
            normed = normed.to(x.dtype)
        normed = normed * (weight.float() + offset).view(heads.shape[-2:] if per_token else -1)
    return _joined(normed.to(x.dtype), head_dim, heads_first)


for _name, _formula in (("rotate_grid", rotate_grid), ("rotate_tokens", rotate_tokens)):
    transform_with(_name, _formula)
    transform_with(f"{_name}_", _in_place(_formula))
    refuse_negated(f"{_name}_")
transform_with("norm_rotate", norm_rotate)


# --- fakes: shapes and dtypes of results; the binding checks the arguments ------------------------------------------


def _like(tensor):
    return None if tensor is None else tensor.new_empty(tensor.shape)


def _rotated_fake(q, k, *arguments, **options):
    return _like(q), _like(k)


def _in_place_fake(q, k, *arguments, **options):
    pass


for _name in ("rotate_grid", "rotate_tokens", "norm_rotate"):
    torch.library.register_fake(add_op_namespace_prefix(_name))(_rotated_fake)
for _name in ("rotate_grid_", "rotate_tokens_"):
    torch.library.register_fake(add_op_namespace_prefix(_name))(_in_place_fake)


@torch.library.register_fake(add_op_namespace_prefix("grid_table"))
def _grid_table_fake(f, h, w, f_pairs, h_pairs, w_pairs, order, theta, scale, offset, device):
    _, entries = rows_of((f_pairs, h_pairs, w_pairs), order == "in_turn")
    return torch.empty(f + h + w, entries, 2, device=device)


@torch.library.register_fake(add_op_namespace_prefix("norm_rotate_backward"))
def _norm_rotate_backward_fake(
    grad_q, grad_k, of_q_weight, of_k_weight, q, k, q_weight, k_weight, *arguments, **options
):
    of_q = _like(q_weight) if of_q_weight else None
    of_k = _like(k_weight) if of_k_weight else None
    return _like(grad_q), _like(grad_k), of_q, of_k


refuse_cpu("rotate_grid", "rotate_grid_", "rotate_tokens", "rotate_tokens_", "norm_rotate", "norm_rotate_backward")
