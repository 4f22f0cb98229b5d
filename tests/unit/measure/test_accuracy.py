"""How far a kernel's result deviates from the exact one, and when that makes the result wrong."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_builder.measure.accuracy import deviation, fault
from kernel_builder.measure.results import Deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_correct_rounding_is_at_most_half_an_ulp(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.rand(1000, dtype=torch.float64)
    measured = deviation(exact.to(dtype), exact)
    assert 0 < measured.relative < torch.finfo(dtype).eps and 0.2 < measured.ulps <= 0.5
    assert fault([measured], [measured], 1.1) is None


def test_wrong_shapes_and_infinities_deviate_infinitely() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert deviation(torch.ones(2, 2), exact) == deviation(exact.float() / 0, exact) == (math.inf, math.inf)
    assert deviation(torch.ones(0), torch.ones(0, dtype=torch.float64)) == (0, 0)


def test_faults_name_the_result() -> None:
    good, rough, spike = Deviation(1e-3, 0.5), Deviation(1.2e-3, 0.5), Deviation(1e-3, 1.2)
    assert fault([good, good], [good, good], 1.1) is None
    assert "result 2 is 0.0012 relative to its norm" in str(fault([good, rough], [good, good], 1.1))
    assert "its error is 1.2 ulps" in str(fault([spike], [good], 1.1))
    assert "1 result, expected 2" in str(fault([good], [good, good], 1.1))
    assert fault([Deviation(math.nan, 0.0)], [good], 1.1)
    assert fault([rough], [good], 4.0) is None
