"""Every error names the argument."""

import pytest
import torch
from reference_adaln import kernel
from testing import DEVICE

HALF = torch.zeros(2, 5, 8, dtype=torch.float16)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("residual must be float32, float16 or bfloat16", {"residual": torch.zeros(2, 5, 8, dtype=torch.float64)}),
        ("residual must have at least one dimension", {"residual": torch.zeros(())}),
        (r"branch must have shape \[2, 5, 8\], not \[5, 8\]", {"branch": torch.zeros(5, 8)}),
        ("branch must have the dtype of residual", {"branch": HALF}),
        (r"gate must have the shape of residual, \[2, 5, 8\], .* not \[5, 8\]", {"gate": torch.zeros(5, 8)}),
        (r"scale must have the shape of residual, .* not \[1, 5, 8\]", {"scale": torch.zeros(1, 5, 8)}),
        (r"shift must have the shape of residual, .* not \[2, 7\]", {"shift": torch.zeros(2, 7)}),
        ("shift must have as many rows as scale", {"shift": torch.zeros(2, 5, 8)}),
        ("gate must have as many rows as scale", {"gate": torch.zeros(8)}),
        ("scale must have the dtype of residual, or float32", {"scale": HALF[:, 0]}),
        ("shift must have the dtype of scale", {"residual": HALF, "branch": HALF, "scale": HALF[:, 0]}),
        ("shift must be given, too", {"shift": None}),
        ("scale must be given, too", {"scale": None}),
        (r"weight must have shape \[8\], not \[7\]", {"weight": torch.zeros(7)}),
        ("bias must have the dtype of residual, or float32", {"bias": torch.zeros(8, dtype=torch.float16)}),
    ],
)
def test_errors_name_the_argument(message, arguments):
    given = {name: torch.zeros(2, 8) for name in ("gate", "scale", "shift")}
    given = {"residual": torch.zeros(2, 5, 8), "branch": torch.zeros(2, 5, 8), **given, **arguments}
    given = {name: tensor if tensor is None else tensor.to(DEVICE) for name, tensor in given.items()}
    with pytest.raises(RuntimeError, match=message):
        kernel.gate_residual_ada_norm(**given)


def test_unknown_norm_or_rounding():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="norm must be"):
        kernel.gate_residual_ada_norm(x, x, x, x, x, norm="batch")
    for function, arguments in ((kernel.ada_layer_norm, 3), (kernel.ada_rms_norm, 3), (kernel.gate_residual, 3)):
        with pytest.raises(ValueError, match="rounding must be"):
            function(*[x] * arguments, rounding="first")
