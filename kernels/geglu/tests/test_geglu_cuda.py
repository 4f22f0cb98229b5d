"""Test streams, CUDA graphs, several devices and large tensors."""

import pytest
import torch
from reference_geglu import eager, kernel, split
from testing import DEVICE, gpu


@gpu
def test_more_elements_than_32_bits_count():
    rows, hidden = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 5 * 2 * hidden * rows:
        pytest.skip("needs 22 GB of GPU memory")
    gate = torch.zeros(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    gate[-1] = torch.arange(hidden, device=DEVICE) % 7 - 3
    last = eager(gate[-1], gate[-1])
    # As rows, as one row, as one unaligned row, and as rows of one element.
    for shape in ((rows, hidden), (-1,), (-1, 1)):
        out = kernel.geglu_pair(gate.view(shape), gate.view(shape)).view(-1)
        torch.testing.assert_close(out[-hidden:], last)
        assert not out[:-hidden].any()
        del out
    flat = gate.view(-1)
    out = kernel.geglu_pair(flat[1:], flat[1:])
    torch.testing.assert_close(out[-hidden:], last)
    assert not out[:-hidden].any()
    del out
    out = kernel.geglu(gate)
    torch.testing.assert_close(out[-1], eager(*split(gate[-1], "second")))
    assert not out[:-1].any()
