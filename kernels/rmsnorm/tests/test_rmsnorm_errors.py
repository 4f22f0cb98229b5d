"""Every error names the argument."""

import pytest
import torch
from reference_rmsnorm import kernel
from testing import DEVICE


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("x must be float32, float16 or bfloat16", {"x": torch.zeros(2, 8, dtype=torch.float64)}),
        ("x must have at least one dimension", {"x": torch.zeros(())}),
        (r"weight must have shape \[8\], not \[7\]", {"weight": torch.zeros(7)}),
        (r"weight must have shape \[8\], not \[1, 8\]", {"weight": torch.zeros(1, 8)}),
        ("weight must have the dtype of x, or float32", {"weight": torch.zeros(8, dtype=torch.float16)}),
        (r"residual must have shape \[2, 8\], not \[8\]", {"residual": torch.zeros(8)}),
        ("residual must have the dtype of x", {"residual": torch.zeros(2, 8, dtype=torch.bfloat16)}),
    ],
)
def test_errors_name_the_argument(message, arguments):
    given = {"x": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8), **arguments}
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    function = kernel.add_rms_norm
    if "residual" not in arguments:
        del given["residual"]
        function = kernel.rms_norm
    with pytest.raises(RuntimeError, match=message):
        function(**given)


@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("residual must be a Tensor, not NoneType", {"residual": None}),
        ("eps must be a number, not str", {"eps": "1e-6"}),
        ("eps must be a number, not NoneType", {"eps": None}),
        ("offset must be a number, not str", {"offset": "1"}),
    ],
)
def test_wrong_types_are_type_errors(message, arguments, grad_enabled):
    tensors = {name: torch.zeros(2, 8, device=DEVICE) for name in ("x", "residual")}
    with torch.set_grad_enabled(grad_enabled):
        for function in (kernel.add_rms_norm, kernel.add_rms_norm_):
            with pytest.raises(TypeError, match=rf"^{function.__name__}: {message}$"):
                function(**{**tensors, **arguments})
        if "residual" not in arguments:
            with pytest.raises(TypeError, match=f"^rms_norm: {message}$"):
                kernel.rms_norm(**{"x": tensors["x"], **arguments})
