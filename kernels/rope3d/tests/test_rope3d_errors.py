"""Every error names the argument."""

import pytest
import torch
from reference_rope3d import kernel, ops
from testing import DEVICE

# The arguments of the ops after q and k.
FORM = {"prefix": 0, "head_dim": 0, "half": False, "heads_first": False, "inverse": False}
Q, K, WEIGHT = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8), torch.zeros(8)
PAIRS = {"frame_pairs": 2, "height_pairs": 1, "width_pairs": 1, "in_turn": False}
TABLES = {"cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4)}
GRID = {"table": torch.zeros(6, 8, 2), "frames": 1, "height": 2, "width": 3, **PAIRS, **FORM}
TOKENS = {**TABLES, "rotary_dim": 0, **FORM}
WEIGHTS = {"q_weight": WEIGHT, "k_weight": WEIGHT, **TABLES}
GRADIENTS = {"grad_q": Q, "grad_k": K, "of_q_weight": True, "of_k_weight": False, "eps": 1e-6, **WEIGHTS}

OF_BOTH = [
    ("q must be float32, float16 or bfloat16", {"q": torch.zeros(2, 6, 4, 8, dtype=torch.float64)}),
    ("q must have 4 dimensions, not 2", {"q": torch.zeros(6, 8)}),
    ("q must have 4 dimensions, not 3", {"q": torch.zeros(2, 6, 8), "heads_first": True}),
    ("q must have 3 dimensions, not 4", {"head_dim": -1}),
    ("prefix must not be negative", {"prefix": -1}),
    ("q must have an even number of elements in each head", {"q": torch.zeros(2, 6, 4, 7)}),
    ("q must have a multiple of 3 elements", {"q": torch.zeros(2, 6, 8), "head_dim": 3}),
    ("k must have the dtype of q", {"k": torch.zeros(2, 6, 2, 8, dtype=torch.float16)}),
    ("k must have as many sequences, tokens and elements", {"k": torch.zeros(2, 6, 2, 10)}),
]
OF_GRIDS = [
    ("q must have heads of at least 10 elements, not 8", {"width_pairs": 2}),
    (r"grid and prefix must have 6 tokens, as q has, not 2 \* 2 \* 3 \+ 0", {"frames": 2}),
    ("grid must have no negative size", {"frames": -1, "height": -6, "width": 13}),
    ("grid must have no negative size, nor a negative number of pairs", {"frame_pairs": -1}),
    ("table must be float32", {"table": torch.zeros(6, 8, 2, dtype=torch.float16)}),
    (r"table must have shape \[rows, entries, 2\], not \[6, 16\]", {"table": torch.zeros(6, 16)}),
    (r"table must have shape \[6, 8, 2\], not \[6, 4, 2\]", {"table": torch.zeros(6, 4, 2)}),
    ("table must be contiguous", {"table": torch.zeros(8, 6, 2).transpose(0, 1)}),
]
OF_TOKENS = [
    ("cos must be float32, float16 or bfloat16", {"cos": torch.zeros(6, 4).double()}),
    ("sin must have the dtype of cos", {"sin": torch.zeros(6, 4).half()}),
    (r"sin must have shape \[6, 4\], not \[4, 6\]", {"sin": torch.zeros(4, 6)}),
    ("cos must have two or three dimensions", {"cos": torch.zeros(6), "sin": torch.zeros(6)}),
    ("cos must be for one sequence or for 2, not 3", dict.fromkeys(("cos", "sin"), torch.zeros(3, 6, 4))),
    ("cos must have 6 or 3 in its last dimension, not 4", {"rotary_dim": 6}),
    *((f"rotary_dim must be even and from 0 to 8, not {dim}", {"rotary_dim": dim}) for dim in (-4, 10)),
    (r"cos and prefix must have 6 tokens, as q has, not 6 \+ 2", {"prefix": 2}),
]
OF_NORMS = [
    (r"q_weight must have shape \[8\], not \[7\]", {"q_weight": torch.zeros(7)}),
    (r"q_weight must have shape \[32\], not \[8\]", {"norm": "token"}),
    (r"k_weight must have shape \[8\], not \[1, 8\]", {"k_weight": torch.zeros(1, 8)}),
    (r"k_weight must have shape \[16\], not \[8\]", {"norm": "token", "q_weight": torch.zeros(32)}),
    ("k_weight must have the dtype of q, or float32", {"k_weight": torch.zeros(8, dtype=torch.float16)}),
    ("q_weight must be float32, float16 or bfloat16", {"q_weight": torch.zeros(8, dtype=torch.float64)}),
    ("k_weight must be None without k", {"k": None}),
]
OF_BACKWARD = [
    (r"grad_q must have shape \[2, 6, 4, 8\], not \[2, 6, 2, 8\]", {"grad_q": torch.zeros(2, 6, 2, 8)}),
    ("grad_k must have the dtype of k", {"grad_k": torch.zeros(2, 6, 2, 8, dtype=torch.float16)}),
    ("grad_k must be None without k", {"k": None, "k_weight": None}),
    ("q_weight must be given for its gradient", {"q_weight": None}),
    ("q_weight has a gradient only with that of the result", {"grad_q": None}),
]
OF_CHOICES = [
    ("order must be", {"order": "sideways"}),
    ("widths must be None with the order", {"widths": (2, 2, 2), "order": "in_turn"}),
    ("pairs must be", {"pairs": "quarter"}),
    ("layout must be", {"layout": "sbhd"}),
    ("head_dim must be positive, and goes with", {"head_dim": 8}),
    ("scale must be one number or 3, not 4", {"scale": (1.0,) * 4}),
    (r"widths must be 3 even numbers of at most 8 in sum, not \[2, 2, 6\]", {"widths": (2, 2, 6)}),
    ("grid must have 3 sizes, not 2", {"grid": (2, 3)}),
    ("positions must be given for 3 axes, not 2", {"positions": [[0], [0, 1]]}),
    ("positions must be as many as grid has on each axis", {"positions": [[0], [0], [0, 1, 2]]}),
    ("grid or positions must be given", {"grid": None}),
]
NORM_CHOICES = [(f"{name} must be", {name: "first"}) for name in ("norm", "rounding")]


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("function", "valid", "cases", "error"),
    [
        (ops.rotate_grid, GRID, OF_BOTH + OF_GRIDS, RuntimeError),
        (ops.rotate_tokens_, TOKENS, OF_BOTH, RuntimeError),
        (ops.rotate_tokens, TOKENS, OF_TOKENS, RuntimeError),
        (kernel.norm_rotary, WEIGHTS, OF_NORMS, RuntimeError),
        (ops.norm_rotate_backward, GRADIENTS, OF_BACKWARD, RuntimeError),
        (kernel.rope3d, {"grid": (1, 2, 3)}, OF_CHOICES, ValueError),
        (kernel.norm_rotary, WEIGHTS, NORM_CHOICES, ValueError),
    ],
)
def test_errors_name_the_argument(function, valid, cases, error):
    for message, changes in cases:
        given = {"q": Q, "k": K, **valid, **changes}
        with pytest.raises(error, match=message):
            function(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_wrong_types_are_type_errors(grad_enabled):
    q, table = torch.zeros(2, 6, 4, 8, device=DEVICE), torch.zeros(6, 4, device=DEVICE)
    cases = [
        (kernel.rope3d, (q, q, 6), {}, "grid must be a sequence or None, not int"),
        (kernel.rope3d, (q, q, (1, 2, 3)), {"theta": "big"}, "theta must be a number or a sequence, not str"),
        (kernel.rope3d, (q, q, (1, 2, 3)), {"prefix": "0"}, "prefix must be an integer, not str"),
        (kernel.apply_rotary, (q, q, table, 0.5), {}, "sin must be a Tensor, not float"),
        (kernel.norm_rotary, (q, q, None, None, table, None), {}, "sin must be a Tensor, not NoneType"),
        (kernel.norm_rotary, (q, q, None, None, table, table), {"eps": "0"}, "eps must be a number, not str"),
    ]
    with torch.set_grad_enabled(grad_enabled):
        for function, arguments, named, message in cases:
            with pytest.raises(TypeError, match=f"^{function.__name__}: {message}$"):
                function(*arguments, **named)
