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


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it uses two devices")
def test_errors_name_the_argument_on_another_device():
    x = torch.zeros(2, 8, device="cuda")
    with pytest.raises(RuntimeError, match="up must be on the device of gate"):
        kernel.geglu_pair(x, x.cpu())
    with pytest.raises(RuntimeError, match="gate must be on a CUDA device"):
        kernel.geglu_pair(x.cpu(), x)
    with pytest.raises(NotImplementedError, match='backend="cpu"'):
        kernel.geglu_pair(x.cpu(), x.cpu())


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_wrong_types_are_type_errors(grad_enabled):
    x = torch.zeros(2, 8, device=DEVICE)
    with torch.set_grad_enabled(grad_enabled):
        for function in (kernel.geglu, kernel.swiglu):
            with pytest.raises(TypeError, match=f"^{function.__name__}_pair: up must be a Tensor, not str$"):
                function(x, "tanh")
            with pytest.raises(TypeError, match=f"^{function.__name__}: x must be a Tensor, not NoneType$"):
                function(None)
        for function in (kernel.geglu_pair, kernel.swiglu_pair):
            with pytest.raises(TypeError, match=f"^{function.__name__}: gate must be a Tensor, not list$"):
                function([0.0], x)
            with pytest.raises(TypeError, match=f"^{function.__name__}: up must be a Tensor, not NoneType$"):
                function(x, None)
