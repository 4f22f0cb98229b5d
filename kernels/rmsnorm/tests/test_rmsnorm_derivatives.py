"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_rmsnorm import exact, kernel
from testing import DTYPES, random
from torch.utils.checkpoint import checkpoint

OPTIONS = {"plain": {}, "offset": {"offset": 1.0}, "before the weight": {"rounding": "before_weight"}}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_derivatives(options, dtype):
    options = OPTIONS[options]
    x, residual = (random(2, 3, 16, dtype=dtype) for _ in range(2))
    for weight in (random(16, dtype=dtype), random(16, dtype=torch.float32)):
        assert_derivatives(
            lambda x, weight: kernel.rms_norm(x, weight, **options),
            lambda x, weight: exact(x, weight, **options),
            (x, weight),
        )
    assert_derivatives(kernel.rms_norm, exact, (x,), traced=dtype == torch.float32 and not options)

    def exact_add(x, residual, weight):
        return exact(x + residual, weight, **options), x + residual

    assert_derivatives(
        lambda *tensors: kernel.add_rms_norm(*tensors, **options), exact_add, (x, residual, random(16, dtype=dtype))
    )


def test_in_place():
    x, residual, weight = (random(*shape, dtype=torch.float32) for shape in ((3, 16), (3, 16), (16,)))

    def in_place(x, residual):
        x, residual = x * 1, residual * 1
        kernel.add_rms_norm_(x, residual, weight)
        return x, residual

    def out_of_place(x, residual):
        return kernel.add_rms_norm(x, residual, weight)

    given, directions = (x, residual), (residual, x)
    actual, expected = (torch.func.jvp(function, given, directions) for function in (in_place, out_of_place))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.vmap(in_place)(*given), torch.func.vmap(out_of_place)(*given))
    with pytest.raises(NotImplementedError, match="add_rms_norm_ has no gradient"):
        torch.func.grad(lambda x: in_place(x, residual)[0].sum())(x)


def test_backward_runs_the_kernel_wherever_autograd_does():
    """Checkpoints, hooks and functions of torch.autograd change no bit of a gradient."""
    x, weight = random(3, 16, dtype=torch.float32, requires_grad=True), random(16, dtype=torch.float32)
    expected = torch.autograd.grad(kernel.rms_norm(x, weight).sum(), x)
    for reentrant in (False, True):
        again = checkpoint(kernel.rms_norm, x, weight, use_reentrant=reentrant).sum()
        again.backward() if reentrant else x.__setattr__("grad", *torch.autograd.grad(again, x))
        assert torch.equal(x.grad, *expected)
        x.grad = None
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(*torch.autograd.grad(kernel.rms_norm(x, weight).sum(), x), *expected)
