"""Operations are joined and moved only where they read the same values: models that write to tensors in between."""

import pytest
import torch
from model_cases import RecordedModel
from test_blocks_traced import Calls
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels", "no_grad")


def rotated(heads, cos, sin):
    first, second = heads.chunk(2, -1)
    return torch.cat((-second, first), -1) * sin + heads * cos


def after_a_cast(x, y):
    wide = x.float()
    x.neg_()
    return (wide + y.float() * y).to(x.dtype)


def to_one_of_two_copies(x, y):
    columns = x.mT
    first, second = columns.flatten(), columns.flatten()
    first.neg_()
    return second


def to_a_copy_of_a_sum(x, y):
    """Its elements are not contiguous: `flatten` copies them."""
    total = x.mT.contiguous().mT + y * y
    total.flatten().zero_()
    return total


def to_a_copy_of_rotated_heads(x, y):
    cos, sin = y[0].chunk(2, -1)
    result = rotated(x.unflatten(-1, (2, 16)).transpose(1, 2), cos, sin)
    result.transpose(1, 2).flatten(2).zero_()
    return result


def to_tables_between_their_casts(x, y):
    tables, heads = y[0, :, None].chunk(2, -1), x.unflatten(-1, (2, 16))
    more = 2 * heads
    early = [table.float() for table in tables]
    y.mul_(2)
    late = [table.float() for table in tables]
    return rotated(heads.float(), *early).to(x.dtype) + rotated(more.float(), *late).to(x.dtype)


def to_a_causal_mask(x, y):
    """Causal but for the first tokens, as that of a prefix."""
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[0, :3] = True
    mask[1:3].narrow(1, 0, 3).fill_(True)
    return F.scaled_dot_product_attention(x, y, y, attn_mask=mask)


def random_numbers(x, y):
    total = x + y
    first, second = F.dropout(total), F.dropout(y)
    return F.layer_norm(total, (32,)) * (1 + second) + y + first


@pytest.mark.parametrize(
    "forward",
    [
        *(after_a_cast, to_one_of_two_copies, to_a_copy_of_a_sum, to_a_copy_of_rotated_heads),
        *(to_tables_between_their_casts, to_a_causal_mask, random_numbers),
    ],
)
def test_values_are_those_of_the_model(blocks, forward):
    inputs = torch.randn(2, 2, 6, 32, dtype=torch.bfloat16)
    torch.manual_seed(1)
    expected = forward(*inputs.clone())
    torch.manual_seed(1)
    torch.testing.assert_close(RecordedModel(blocks, Calls(forward))(*inputs), expected, rtol=0.02, atol=0.02)
