"""Compare the naive kernels with float64."""

import pytest
from reference_decode import PROJECT, assert_as_good, eager_attention, eager_gated, eager_linear
from testing import DTYPES, doubles, gpu, load, random


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_naive(dtype):
    naive = load(PROJECT / "naive")
    for rows, inputs, outputs in ((1, 8, 5), (8, 1000, 300)):
        x, weight, up = (
            random(*shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs, inputs))
        )
        reference, expected = eager_linear(x, weight), eager_linear(*doubles([x, weight]))
        assert_as_good(naive.linear(x, weight), reference, expected)
        reference, expected = eager_gated(x, weight, up), eager_gated(*doubles([x, weight, up]))
        assert_as_good(naive.gated_linear(x, weight, up), reference, expected)
    for group, tokens, elements in ((1, 1, 8), (4, 300, 128)):
        query, key, value = (
            random(*shape, dtype=dtype)
            for shape in ((2, 2 * group, 1, elements), (2, 2, tokens, elements), (2, 2, tokens, elements))
        )
        reference = eager_attention(query, key, value).contiguous()
        expected = eager_attention(*doubles([query, key, value]))
        assert_as_good(naive.attention(query, key, value), reference, expected, 2.0)
