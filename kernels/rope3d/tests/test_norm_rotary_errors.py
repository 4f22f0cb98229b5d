"""Every error of norm_rotary names the argument."""

import pytest
import torch
from reference_rope3d import kernel, ops
from testing import DEVICE

EPS = 1e-6


def assert_refused(message, changes):
    given = {"q": torch.zeros(2, 6, 4, 8), "k": torch.zeros(2, 6, 2, 8), "q_weight": torch.zeros(8)}
    given = {**given, "k_weight": torch.zeros(8), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4), **changes}
    with pytest.raises(RuntimeError, match=message):
        kernel.norm_rotary(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q_weight must have shape \[8\], not \[7\]", {"q_weight": torch.zeros(7)}),
        (r"q_weight must have shape \[32\], not \[8\]", {"norm": "token"}),
        (r"k_weight must have shape \[8\], not \[1, 8\]", {"k_weight": torch.zeros(1, 8)}),
        (r"k_weight must have shape \[16\], not \[8\]", {"norm": "token", "q_weight": torch.zeros(32)}),
        ("k_weight must have the dtype of q, or float32", {"k_weight": torch.zeros(8, dtype=torch.float16)}),
        ("q_weight must be float32, float16 or bfloat16", {"q_weight": torch.zeros(8, dtype=torch.float64)}),
        ("k_weight must be None without k", {"k": None}),
    ],
)
def test_errors_name_the_argument(message, changes):
    assert_refused(message, changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"grad_q must have shape \[2, 6, 4, 8\], not \[2, 6, 2, 8\]", {"grad_q": torch.zeros(2, 6, 2, 8)}),
        ("grad_k must have the dtype of k", {"grad_k": torch.zeros(2, 6, 2, 8, dtype=torch.float16)}),
        ("grad_k must be None without k", {"k": None, "k_weight": None}),
        ("q_weight must be given for its gradient", {"q_weight": None}),
        ("q_weight has a gradient only with that of the result", {"grad_q": None}),
    ],
)
def test_errors_of_the_backward_pass(message, changes):
    q, k = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)
    given = {"grad_q": q, "grad_k": k, "of_q_weight": True, "of_k_weight": False, "q": q, "k": k, "eps": EPS}
    given = {
        **given,
        "q_weight": torch.zeros(8),
        "k_weight": torch.zeros(8),
        "cos": torch.zeros(6, 4),
        "sin": torch.zeros(6, 4),
    }
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in {**given, **changes}.items()}
    with pytest.raises(RuntimeError, match=message):
        ops.norm_rotate_backward(**given)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("norm must be", {"norm": "batch"}),
        ("rounding must be", {"rounding": "first"}),
    ],
)
def test_wrong_values(message, changes):
    q, table = torch.zeros(2, 6, 4, 8, device=DEVICE), torch.zeros(6, 4, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        kernel.norm_rotary(q, None, None, None, table, table, **changes)
