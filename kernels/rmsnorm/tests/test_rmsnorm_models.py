"""Test the options that models need: rounding, weight offset, norms of heads, and writing in place."""

import pytest
import torch
from reference_rmsnorm import EPS, assert_accurate_sum, eager, exact, gradients_of_rows, kernel
from testing import DTYPES, assert_accurate, assert_as_good, copies, random, units_apart


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 100, 128, 1001, 4096, 20001])
def test_rounding(hidden, dtype, offset, rounding):
    """The result equals that of a model's code up to one unit, which the last bit of the square root may cost.

    A float32 sum may differ from another by more units of its own: float32 is tested against float64.
    """
    x, residual = random(7, hidden, dtype=dtype), random(7, hidden, dtype=dtype)
    for weight in (random(hidden, dtype=dtype), random(hidden, dtype=torch.float32), None):
        options = {"eps": EPS, "offset": offset, "rounding": rounding}
        expected = eager(x, weight, **options)
        normed = kernel.rms_norm(x, weight, **options)
        if expected.dtype == torch.float32:  # an intermediate is rounded to `dtype`: one unit of that
            unit = torch.finfo(dtype).eps * expected.abs()
            assert normed.dtype == torch.float32 and ((normed - expected).abs() <= unit).all()
        else:
            # A unit of the inner rounding may be two of the outer.
            assert rounding != "last" or units_apart(normed, expected).max() <= 1
            assert_as_good(normed, expected, exact(x, weight, **options))
        assert (normed == expected).float().mean() > 0.98
        again, total = kernel.add_rms_norm(x, residual, weight, **options)
        assert torch.equal(total, x + residual)
        assert torch.equal(again, kernel.rms_norm(total, weight, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 128, 5000])
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
def test_gradients_with_options(hidden, rounding, dtype):
    options = {"eps": EPS, "offset": 1.0, "rounding": rounding}
    for weight_dtype in {dtype, torch.float32}:
        x, residual = (random(9, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
        weight = random(hidden, dtype=weight_dtype, requires_grad=True)
        grads = [random(9, hidden, dtype=dtype) for _ in range(2)]
        functions = [lambda x, w, f=f: f(x, w, **options) for f in (kernel.rms_norm, eager, exact)]
        assert_accurate(*functions, [x, weight], grads[:1], results=False)
        assert_accurate_sum(x, residual, weight, grads, offset=1.0, rounding=rounding)


def test_unknown_rounding_is_refused():
    x = random(2, 8, dtype=torch.float32)
    for function, tensors in ((kernel.rms_norm, 1), (kernel.add_rms_norm, 2), (kernel.add_rms_norm_, 2)):
        with pytest.raises(ValueError, match="rounding must be"):
            function(*[x.clone() for _ in range(tensors)], rounding="first")


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(dtype):
    """q and k as [B, S, heads, head_dim], and its transpose, are read in place."""
    heads = random(2, 50, 6, 128, dtype=dtype)
    weight = random(128, dtype=dtype)
    transposed = heads.transpose(1, 2)
    expected = kernel.rms_norm(heads, weight, rounding="before_weight")
    for part in (slice(None), slice(0, 4), slice(4, 6)):  # q, k and v from one projection
        normed = kernel.rms_norm(heads[:, :, part], weight, rounding="before_weight")
        assert torch.equal(normed, expected[:, :, part]) and normed.is_contiguous()
    normed = kernel.rms_norm(transposed, weight, rounding="before_weight")
    assert torch.equal(normed, expected.transpose(1, 2)) and normed.is_contiguous()
    for x in (heads, heads[:, :, :4], transposed, transposed[:, :4], transposed[:, :, 1::2]):
        assert not copies(lambda x=x: kernel.rms_norm(x, weight))
        assert not copies(lambda x=x: gradients_of_rows(x, x, weight, None))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 128, 5000, 20001])
def test_in_place(hidden, dtype):
    weight = random(hidden, dtype=dtype)
    for rounding in ("last", "before_weight"):
        x, wide = random(6, 5, hidden, dtype=dtype), random(5, 6, hidden + 3, dtype=dtype)
        residual = wide.transpose(0, 1)[..., 1 : hidden + 1]  # strided, unaligned rows
        around = wide[..., hidden + 1 :].clone(), wide[..., :1].clone()
        normed, total = kernel.add_rms_norm(x, residual, weight, EPS, rounding=rounding)
        version = x._version
        assert kernel.add_rms_norm_(x, residual, weight, EPS, rounding=rounding) is None
        assert torch.equal(x, normed) and torch.equal(residual, total)
        assert torch.equal(wide[..., hidden + 1 :], around[0]) and torch.equal(wide[..., :1], around[1])
        assert x._version > version  # autograd sees the change
    kernel.add_rms_norm_(x[:0], residual[:0], weight)


def test_in_place_refuses_what_it_cannot_write():
    x, weight = random(4, 8, dtype=torch.float16), random(8, dtype=torch.float16)
    for argument, tensor in (("x", x[:1].expand(4, 8)), ("x", random(8, 4, dtype=torch.float16).t())):
        with pytest.raises(RuntimeError, match=f"{argument} must .* changed in place"):
            kernel.add_rms_norm_(tensor, x, weight)
        with pytest.raises(RuntimeError, match=r"residual must .* changed in place"):
            kernel.add_rms_norm_(x, tensor, weight)
    with pytest.raises(RuntimeError, match="weight must have the dtype of x"):
        kernel.add_rms_norm_(x, x.clone(), weight.float(), rounding="before_weight")
    wide, beside = random(6, 20, dtype=torch.float16), random(6, 8, dtype=torch.float16)
    for a, b in ((x, x), (wide[:, :8], wide[:, 4:12]), (wide[1:, 4:12], wide[:5, 2:10]), (beside[:4], beside[2:])):
        with pytest.raises(RuntimeError, match="residual must not be x, nor share memory with it"):
            kernel.add_rms_norm_(a, b, weight)
    for a, b in ((wide[:, :8], wide[:, 8:16]), (wide[::2, :8], wide[1::2, :8]), (beside[:3], beside[3:])):
        kernel.add_rms_norm_(a, b, weight)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        kernel.add_rms_norm_(x, x.clone(), weight.requires_grad_())
