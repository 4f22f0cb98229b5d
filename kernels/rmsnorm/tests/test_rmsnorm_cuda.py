"""Test streams, CUDA graphs, programmatic dependent launch and large tensors."""

import pytest
import torch
from reference_rmsnorm import EPS, assert_accurate_sum, eager, exact, gradients_of_rows, kernel
from testing import DEVICE, DTYPES, assert_accurate, assert_as_good, gpu, random


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
