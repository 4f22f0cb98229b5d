"""Compare results and gradients with float64."""

import pytest
import torch
from reference_rmsnorm import EPS, HIDDEN, assert_accurate_sum, eager, exact, gradients_of_rows, kernel, random
from testing import DEVICE, DTYPES, assert_accurate, assert_as_good, copies, doubles, gpu, results_and_gradients, views


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(5, h) for h in HIDDEN]
    + [(1, 64), (700, 64), (2, 150, 136), (300, 1000)]
    # Row lengths that are not a multiple of a vector: the alignment repeats after a number of rows; there are as many
    # rows, fewer, and more.
    + [(1, 4097), (2, 8191), (7, 65), (8, 1002), (9, 1001), (300, 4095), (700, 63), (2000, 7)],
)
def test_norm(shape, dtype):
    x, grad = random(*shape, dtype=dtype, requires_grad=True), random(*shape, dtype=dtype)
    assert kernel.rms_norm(x).is_contiguous()
    assert_accurate(kernel.rms_norm, eager, exact, [x], [grad])
    for weight_dtype in {dtype, torch.float32}:
        weight = random(shape[-1], dtype=weight_dtype, requires_grad=True)
        assert_accurate(kernel.rms_norm, eager, exact, [x, weight], [grad])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*((5, h) for h in HIDDEN), (1, 1), (1, 33), (1, 128), (1, 1001), (1, 4096)])
def test_norm_of_sum(shape, dtype):
    x, residual = (random(*shape, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = random(shape[-1], dtype=dtype, requires_grad=True)
    assert_accurate_sum(x, residual, weight, [random(*shape, dtype=dtype) for _ in range(2)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 4096), (2000, 1000), (300, 9000), (64, 30000), (64, 70000)])
def test_error_over_many_rows(shape, dtype):
    """Compare the mean error over many rows, which reveals a norm that is slightly wrong for a whole row."""
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    expected = exact(x, weight)
    ours = (kernel.rms_norm(x, weight, EPS).double() - expected).norm()
    assert ours <= 1.1 * (eager(x, weight).double() - expected).norm()


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_bytes", [32784, 49168, 65536, 65552, 131072, 131088])
def test_rows_of_several_sizes_of_the_ring(row_bytes, dtype):
    """One row, almost one per SM, one per SM, several, and so many that not all SMs take equally many."""
    sms, hidden = torch.cuda.get_device_properties(0).multi_processor_count, row_bytes // dtype.itemsize
    weight = random(hidden, dtype=dtype)
    for rows in (1, sms // 4, sms - 1, sms, 5 * sms + 1, 16 * sms + 5):
        x = random(rows, hidden + 8, dtype=dtype)[:, :hidden]
        x[rows // 2, -1] = float("nan")
        finite = torch.arange(rows, device=DEVICE) != rows // 2
        normed = kernel.rms_norm(x, weight)
        assert normed[rows // 2].isnan().all()
        x = x[finite]
        assert_as_good(normed[finite], eager(x, weight), exact(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 2048), (8192, 128), (32768, 64)])
def test_error_of_gradients_over_many_rows(shape, dtype):
    """The weight's gradient is a sum over rows; the rounding errors of a sequential sum would add up."""
    inputs = [random(*s, dtype=dtype, requires_grad=True) for s in (shape, shape[-1:])]
    grads = [random(*shape, dtype=dtype)]
    _, expected = results_and_gradients(exact, doubles(inputs), grads)
    both = (results_and_gradients(function, inputs, grads)[1] for function in (kernel.rms_norm, eager))
    for ours, theirs, right in zip(*both, expected):
        assert (ours.double() - right).norm() <= 1.1 * (theirs.double() - right).norm()


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_eps(eps):
    x, weight = (random(*shape, dtype=torch.float32, requires_grad=True) for shape in ((6, 40), (40,)))
    grad = random(6, 40, dtype=torch.float32)
    total = kernel.add_rms_norm(x, x, weight, eps)[0]
    assert_as_good(total, eager(x + x, weight, eps), exact(x + x, weight, eps))
    functions = [lambda x, weight, f=f: f(x, weight, eps) for f in (kernel.rms_norm, eager, exact)]
    assert_accurate(*functions, [x, weight], [grad])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 64, 1001])
def test_strides(hidden, dtype):
    weight = random(2 * hidden, dtype=dtype)
    for name, x in views(hidden, dtype).items():
        other = random(*x.shape[::-1], dtype=dtype).permute(*reversed(range(x.dim())))
        for w in (weight[:hidden], weight[::2], weight[1 : hidden + 1]):
            expected = kernel.rms_norm(x.contiguous(), w.contiguous())
            torch.testing.assert_close(kernel.rms_norm(x, w), expected, rtol=1e-2, atol=1e-2, msg=name)
            assert_as_good(kernel.rms_norm(x, w), eager(x, w), exact(x, w))
        normed, total = kernel.add_rms_norm(x, other, w)
        assert torch.equal(total, x + other), name
        assert_as_good(normed, eager(total, w), exact(total, w))
        grad_x, grad_weight = gradients_of_rows(other, x, w, x)
        same_x, same_weight = gradients_of_rows(other.contiguous(), x.contiguous(), w, x.contiguous())
        torch.testing.assert_close(grad_x, same_x, msg=name)
        torch.testing.assert_close(grad_weight, same_weight, msg=name)


def test_rows_are_read_in_place():
    storage = random(64, 3, 256, dtype=torch.float32)
    assert not copies(lambda: kernel.rms_norm(storage[:, 1:, :128]))
    assert copies(lambda: kernel.rms_norm(storage[:, :, ::2]))


def test_every_float16():
    """Every float16 value is read and written exactly: rows of one element, scaled back by a weight."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).to(DEVICE)
    zeros = torch.zeros_like(halves)
    assert torch.equal(
        kernel.add_rms_norm(halves[None], zeros[None])[1].nan_to_num(7), (halves + 0)[None].nan_to_num(7)
    )
    wide = torch.cat([halves.float() * f for f in (1 / 3, 1, 1.0004884, 1.5, 1e-3)]).nan_to_num(1.0)
    rounded = kernel.rms_norm(torch.ones(1, wide.numel(), device=DEVICE, dtype=torch.float16), wide, eps=0.0)
    assert torch.equal(rounded[0], wide.to(torch.float16))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [65, 776, 1001, 1024, 2048, 3072, 4097, 5120, 8192])
def test_backward_of_many_rows(hidden, dtype):
    """There are enough rows that each block takes several and loads them ahead; also with gaps between rows."""
    rows = 7001
    grads = [random(rows, hidden + 16, dtype=dtype)[:, :hidden] for _ in range(2)]
    x, residual = (random(rows, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    assert_accurate(kernel.rms_norm, eager, exact, [x], grads[:1], results=False)
    for weight_dtype in {dtype, torch.float32}:
        weight = random(hidden, dtype=weight_dtype, requires_grad=True)
        assert_accurate(kernel.rms_norm, eager, exact, [x, weight], grads[:1], results=False)
        assert_accurate_sum(x, residual, weight, grads)
    first, again = (gradients_of_rows(grads[0], x.detach(), weight.detach(), grads[1]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("shape", [(2, 4096), (300, 4096), (2000, 2048), (1500, 1001), (20000, 128)])
def test_launches_that_follow_at_once(shape):
    """With PDL a kernel starts before the end of the one whose outputs it reads or whose inputs it overwrites."""
    x, residual = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
    weight = random(shape[-1], dtype=torch.bfloat16)
    norms, sums, grads = [x], [residual], [x]
    for _ in range(6):
        norm, total = kernel.add_rms_norm(norms[-1], sums[-1], weight, EPS)
        norms.append(norm)
        sums.append(total)
        grads.append(gradients_of_rows(grads[-1], norm, weight, total)[0])
    in_place = (x.clone(), residual.clone())
    for _ in range(6):
        kernel.add_rms_norm_(*in_place, weight, EPS)
    assert torch.equal(in_place[0], norms[-1]) and torch.equal(in_place[1], sums[-1])
    for before, after in zip(zip(norms, sums, grads), zip(norms[1:], sums[1:], grads[1:])):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        alone = kernel.add_rms_norm(*before[:2], weight, EPS)
        assert torch.equal(alone[0], after[0]) and torch.equal(alone[1], after[1])
        assert torch.equal(gradients_of_rows(before[2], alone[0], weight, alone[1])[0], after[2])


@gpu
def test_more_elements_than_32_bits_count():
    hidden, rows = 4096, 2**19 + 3
    if torch.cuda.mem_get_info()[0] < 3 * 2 * hidden * rows:
        pytest.skip("needs 13 GB of GPU memory")
    x = torch.ones(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.arange(hidden, device=DEVICE) % 7
    normed = kernel.rms_norm(x)
    assert torch.equal(normed[0], torch.ones_like(normed[0]))
    assert_as_good(normed[-1], eager(x[-1]), exact(x[-1]))
    # All elements as one row, and as rows of one element.
    row = x.view(1, -1)
    scale = torch.linalg.vector_norm(row, dtype=torch.float32) / row.shape[1] ** 0.5
    torch.testing.assert_close(kernel.rms_norm(row)[0, -hidden:], (x[-1] / scale).to(x.dtype))
    assert torch.equal(kernel.rms_norm(x.view(-1, 1))[:2], torch.ones(2, 1, device=DEVICE, dtype=x.dtype))
