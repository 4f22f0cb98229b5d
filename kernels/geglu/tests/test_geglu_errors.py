"""Every error names the argument."""

import pytest
import torch
from reference_geglu import kernel, ops
from testing import DEVICE


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("message", "tensors"),
    [
        ("x must be float32, float16 or bfloat16", [torch.zeros(2, 8, dtype=torch.float64)]),
        ("x must have at least one dimension", [torch.zeros(())]),
        ("x must have an even number of elements in its last dimension, not 7", [torch.zeros(2, 7)]),
        ("gate must be float32, float16 or bfloat16", [torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8)]),
        ("gate must have at least one dimension", [torch.zeros(()), torch.zeros(())]),
        (r"up must have shape \[2, 8\], not \[8\]", [torch.zeros(2, 8), torch.zeros(8)]),
        ("up must have the dtype of gate", [torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16)]),
    ],
)
def test_errors_name_the_argument(message, tensors):
    tensors = [tensor.to(DEVICE) for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        (kernel.geglu if len(tensors) == 1 else kernel.geglu_pair)(*tensors)
    with pytest.raises(RuntimeError, match=message):
        (kernel.swiglu if len(tensors) == 1 else kernel.swiglu_pair)(*tensors)


def test_choices_are_checked():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'erf'"):
        kernel.geglu(x, approximate="erf")
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'erf'"):
        kernel.geglu_pair(x, x, "erf")
    for function in (kernel.geglu, kernel.swiglu):
        with pytest.raises(ValueError, match="gate must be 'first' or 'second', not 'third'"):
            function(x, gate="third")
        with pytest.raises(ValueError, match="gate chooses a half of x"):
            function(x, x, gate="first")
    for activation in (-1, 3):
        with pytest.raises(RuntimeError, match=f"activation must be .*, not {activation}"):
            ops.geglu_pair(x, x, activation)
