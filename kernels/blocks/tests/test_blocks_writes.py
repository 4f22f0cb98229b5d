"""Operations are joined and moved only where they read the same values: writes, random numbers, parts and layouts."""

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


def with_a_mask_of_rounded_rows(x, y):
    with torch.autocast(x.device.type, torch.bfloat16):
        rows = torch.arange(256.0, 262)[:, None] @ torch.ones(1, 6)
    return F.scaled_dot_product_attention(x, y, y, attn_mask=rows >= torch.arange(256, 262))


OPS = torch.library.Library("blocks_tests", "DEF")
OPS.define("silu(Tensor(a!) x) -> Tensor")
OPS.impl("silu", lambda x: x.mul_(3).clone(), "CompositeExplicitAutograd")
OPS.define("gelu(Tensor x) -> Tensor")
OPS.impl("gelu", lambda x: 3 * x, "CompositeImplicitAutograd")


def by_ops_of_a_library(x, y):
    """They have names of others."""
    total = x + y
    return torch.ops.blocks_tests.silu(y) + F.layer_norm(total, (32,)) + torch.ops.blocks_tests.gelu(x) * y


def to_running_statistics(x, y):
    wide, (mean, variance) = x.float(), y[0, :2].float().square()
    total = wide + mean.expand_as(wide)
    F.batch_norm(wide.mT, mean, variance, None, None, True, 0.5)
    return F.layer_norm(total, (32,))


def to_embeddings(x, y):
    table = x[0].contiguous()
    total = table + y[0]
    return F.embedding(torch.arange(6), table, None, 0.5) + F.layer_norm(total, (32,))


def random_numbers(draw):
    def forward(x, y):
        total = x + y
        first, second = F.dropout(total), draw(y)
        return F.layer_norm(total, (32,)) * (1 + second) + y + first

    return forward


def rotated_by_one_token(x, y):
    cos, sin = y[0].chunk(2, -1)
    heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
    first, second = heads[:, :, :1].chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def with_one_head_of_a_group(x, y):
    groups = x.unflatten(-1, (2, 2, 8)).permute(0, 2, 3, 1, 4)
    keys = groups[:, :, -1:].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8)
    return F.scaled_dot_product_attention(y.unflatten(-1, (4, 8)).transpose(1, 2), keys, keys)


def with_repeated_tokens(x, y):
    query, keys = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in (torch.cat((y, y), 1), x))
    keys = keys[:, :, None].expand(2, 4, 2, 6, 8).reshape(2, 4, 12, 8)
    return F.scaled_dot_product_attention(query, keys, keys, is_causal=True)


def heads_of_all_samples(x, y):
    heads = x.unflatten(-1, (2, 16)).transpose(1, 2).contiguous()
    return rotated(heads, *y[0].chunk(2, -1)).view(4, 6, 16)


def heads_in_the_layout_of_tokens(compute):
    """Return the function whose result is one of tokens without a copy, as that of operations on elements is."""
    return lambda x, y: (
        compute(*(z.unflatten(-1, (2, 16)).transpose(1, 2) for z in (x, y))).transpose(1, 2).view(x.shape)
    )


def rms_norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(
    "forward",
    [
        *(after_a_cast, to_one_of_two_copies, to_a_copy_of_a_sum, to_a_copy_of_rotated_heads),
        *(to_tables_between_their_casts, to_a_causal_mask, rotated_by_one_token, with_one_head_of_a_group),
        *(with_a_mask_of_rounded_rows, with_repeated_tokens, heads_of_all_samples, by_ops_of_a_library),
        *(to_running_statistics, to_embeddings),
        *map(heads_in_the_layout_of_tokens, (lambda x, y: rms_norm(x + y), lambda x, y: F.silu(x) * y)),
        *map(
            random_numbers, (F.dropout, F.dropout1d, lambda y: torch.normal(0.0, 1.0, y.shape).to(y), F.gumbel_softmax)
        ),
    ],
)
def test_values_are_those_of_the_model(blocks, forward):
    inputs = torch.randn(2, 2, 6, 32, dtype=torch.bfloat16)
    torch.manual_seed(1)
    expected = forward(*inputs.clone())
    torch.manual_seed(1)
    torch.testing.assert_close(RecordedModel(blocks, Calls(forward))(*inputs), expected, rtol=0.02, atol=0.02)
