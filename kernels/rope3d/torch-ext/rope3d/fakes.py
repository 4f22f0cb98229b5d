"""The fakes of the ops: the shapes and dtypes of their results, for torch.compile. The binding checks the arguments."""

import torch

from ._ops import add_op_namespace_prefix
from .devices import refuse_cpu
from .tables import rows_of


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
