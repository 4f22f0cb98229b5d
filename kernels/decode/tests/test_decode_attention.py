"""Compare attention with float64."""

import pytest
import torch
from reference_decode import eager_attention, eager_rotary, kernel
from testing import DEVICE, DTYPES, assert_as_good, doubles, random

# The kernel rounds the weights of the values to 16 bits on CUDA, as other fast ones do and eager PyTorch may not.
FACTOR = 2.0 if DEVICE == "cuda" else 1.1


def check(query, key, value, mask=None, scale=None):
    tensors = [query, key, value]
    out = kernel.attention(*tensors, mask=mask, scale=scale)
    assert_as_good(
        out,
        eager_attention(*tensors, mask, scale).contiguous(),
        eager_attention(*doubles(tensors), mask, scale),
        FACTOR,
    )
    assert out.is_contiguous()
    return out


def inputs(batch, key_heads, group, tokens, elements, dtype):
    query = random(batch, key_heads * group, 1, elements, dtype=dtype)
    return [query, *(random(batch, key_heads, tokens, elements, dtype=dtype) for _ in range(2))]


def eager_cached(query, new_key, new_value, key, value, cos, sin, query_weight, key_weight, norm):
    """Return the attention of a token that is rotated and written at position 40, and the keys after it."""
    turned = eager_rotary(new_key, key_weight, cos, sin, **norm)
    keys, values = (
        torch.cat((cache[:, :, :40], new, cache[:, :, 41:]), 2) for cache, new in ((key, turned), (value, new_value))
    )
    return eager_attention(eager_rotary(query, query_weight, cos, sin, **norm), keys, values), keys


def padded(batch, tokens):
    """Return a mask that excludes another number of tokens at the left of each sequence."""
    first = torch.arange(batch, device=DEVICE)[:, None] * tokens // (batch + 1)
    return (torch.arange(tokens, device=DEVICE) >= first)[:, None, None]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_heads(group, dtype):
    for elements in (8, 64, 72, 80, 96, 128, 256):
        for tokens in (1, 17, 130):
            tensors = inputs(2, 2, group, tokens, elements, dtype)
            check(*tensors)
            check(*tensors, mask=padded(2, tokens), scale=0.3)
    # Torch computes so many tokens of 64 elements; blocks read so many of 96 in step.
    many, few = (24000, 1300) if DEVICE == "cuda" and group == 16 else (300, 130)
    for sizes in [(1, 1, group, 3000, 256), (16, 1, group, many, 64), (5, 32, group, 210, 96), (4, 32, group, few, 96)]:
        check(*inputs(*sizes, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(dtype):
    for tokens in (2, 3, 15, 16, 31, 63, 64, 65, 127, 129, 255, 328, 1000, 1025, 5000):
        tensors = inputs(1, 3, 4, tokens, 64, dtype)
        check(*tensors)
        window = torch.arange(tokens, device=DEVICE) >= tokens - 40
        check(*tensors, mask=window[None, None, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype):
    query, key, value = inputs(3, 2, 4, 200, 64, dtype)
    allowed = torch.rand(3, 1, 1, 200, device=DEVICE) < 0.3
    strided = (torch.rand(3, 1, 1, 400, device=DEVICE) < 0.3)[..., ::2]
    for mask in (allowed, allowed[:1], allowed[:1].expand(3, 1, 1, 200), strided):
        check(query, key, value, mask)
    if DEVICE == "cuda" and dtype == torch.float32:
        return  # Torch computes it, and multiplies excluded values by 0
    # Excluded values are not read.
    hidden = ~allowed[:, :, 0, :, None]
    poisoned = [tensor.masked_fill(hidden, float("nan")) for tensor in (key, value)]
    assert torch.equal(
        kernel.attention(query, *poisoned, mask=allowed), kernel.attention(query, key, value, mask=allowed)
    )
    allowed[1] = False
    out = kernel.attention(query, key, value, mask=allowed)
    assert not out[1].any() and out[0].any() and out[2].any()


def test_large_scores():
    """Scores whose exponentials overflow, and that grow from block to block."""
    query, key, value = inputs(1, 2, 4, 300, 64, torch.float32)
    key = key * torch.linspace(0, 100, 300, device=DEVICE)[:, None]
    check(query, key, value, scale=1.0)
    check(query, key.flip(2), value, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    query, key, value = inputs(2, 2, 4, 50, 64, dtype)
    expected = kernel.attention(query, key, value)
    cache = random(2, 90, 2, 2, 128, dtype=dtype)
    cache[:, 7:57, 0, :, 64:] = key.transpose(1, 2)
    cache[:, 7:57, 1, :, :64] = value.transpose(1, 2)
    views = cache[:, 7:57, 0, :, 64:].transpose(1, 2), cache[:, 7:57, 1, :, :64].transpose(1, 2)
    joined = torch.cat([query, query], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, :8]
    apart = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in (query, key, value)]
    odd = [torch.cat([tensor[..., :1], tensor], -1)[..., 1:] for tensor in (query, key, value)]
    for tensors in ((query, *views), (joined, key, value), apart, odd):
        assert torch.equal(kernel.attention(*tensors), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_token(dtype):
    for group in (1, 4, 16):
        for position in (0, 5, 63, 64, 99):
            query, key, value = inputs(2, 2, group, 100, 80, dtype)
            new_key, new_value = (random(2, 1, 2, 80, dtype=dtype).transpose(1, 2) for _ in range(2))
            cached = [tensor.clone() for tensor in (key, value)]
            for tensor, new in zip(cached, (new_key, new_value)):
                tensor[:, :, position : position + 1] = new
            where = torch.tensor([position], device=DEVICE)
            for mask in (None, padded(2, 100), torch.arange(100, device=DEVICE)[None, None, None] <= position):
                expected = kernel.attention(query, *cached, mask=mask)
                written = [tensor.clone() for tensor in (key, value)]
                out = kernel.attention(
                    query, *written, mask=mask, new_key=new_key, new_value=new_value, position=where.reshape(())
                )
                assert torch.equal(out, expected)
                assert all(torch.equal(*pair) for pair in zip(written, cached))


def test_new_token_in_a_view():
    """A cache that is a part of another tensor: nothing beside the token is written."""
    query, _, _ = inputs(2, 2, 4, 1, 64, torch.bfloat16)
    storage = random(2, 40, 2, 2, 64, dtype=torch.bfloat16)
    before = storage.clone()
    key, value = (storage[:, 3:33, i].transpose(1, 2) for i in (0, 1))
    new_key, new_value = (random(2, 2, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    position = torch.tensor(10, device=DEVICE)
    saved = [torch.ones_like(cached, requires_grad=True) * cached for cached in (key, value)]
    kernel.attention(query, key, value, new_key=new_key, new_value=new_value, position=position)
    for product in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    for i, new in enumerate((new_key, new_value)):
        before[:, 13, i] = new[:, :, 0]
    assert torch.equal(storage, before)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [64, 80, 128, 256])
def test_rotary(elements, dtype):
    """Query and new key are normalized and rotated first, also where a cache of other heads is read."""
    for group, norm in ((4, {}), (1, {"eps": 1e-6, "rounding": "before_weight"}), (10, {"eps": 1e-5, "offset": 1.0})):
        query, key, value = inputs(2, 2, group, 70, elements, dtype)
        new_key, new_value = (random(2, 1, 2, elements, dtype=dtype).transpose(1, 2) for _ in range(2))
        weights = [random(elements, dtype=dtype) if norm else None for _ in range(2)]
        for tables in (1, 2):
            angles = torch.rand(tables, elements // 2, device=DEVICE) * 6
            cos, sin = (table.repeat(1, 2).to(dtype) for table in (angles.cos(), angles.sin()))

            tensors = [query, new_key, new_value, key, value, cos, sin, *weights]
            reference, expected = (eager_cached(*given, {"eps": 0.0, **norm}) for given in (tensors, doubles(tensors)))
            for width in (elements, elements // 2):
                cached = key.clone()
                out = kernel.attention(
                    query,
                    cached,
                    value.clone(),
                    new_key=new_key,
                    new_value=new_value,
                    position=torch.tensor(40, device=DEVICE),
                    cos=cos[:, :width],
                    sin=sin[:, :width],
                    **dict(zip(("query_weight", "key_weight"), weights)),
                    **norm,
                )
                assert_as_good(out, reference[0].contiguous(), expected[0], 2.0)  # the scores of other roundings
                assert_as_good(cached, reference[1], expected[1], 1.5)  # of few elements, the largest error varies


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_cache(dtype):
    """A cache may be read early, but not the token: each layer reads the results of the previous layer."""
    start, _, _ = inputs(2, 2, 4, 1, 64, dtype)
    layers = [random(2, 2, 2, 400, 64, dtype=dtype) for _ in range(12)]
    mask = padded(2, 400)
    results = []
    for constant in (False, True):
        caches = [layer.clone() for layer in layers]
        x = start
        for position, (key, value) in zip(torch.arange(390, 402, device=DEVICE) % 400, caches):
            new = {"new_key": x[:, ::4], "new_value": x[:, 1::4], "position": position, "constant_cache": constant}
            x = kernel.attention(x, key, value, mask=mask, **new).transpose(1, 2)
        results.append([x, *caches])
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*results))


def test_empty():
    query, key, value = inputs(2, 2, 4, 6, 64, torch.bfloat16)
    assert not kernel.attention(query, key[:, :, :0], value[:, :, :0]).any()
    assert kernel.attention(query[:0], key[:0], value[:0]).shape == (0, 1, 8, 64)
    assert kernel.attention(query[:, :0], key, value).shape == (2, 1, 0, 64)


def test_by_torch():
    """In autocast, and for tensors that need a gradient or have a tangent."""
    query, key, value = inputs(2, 2, 4, 30, 64, torch.float32)
    new_key, new_value = (random(2, 2, 1, 64, dtype=torch.float32, requires_grad=True) for _ in range(2))
    query.requires_grad_()
    position = torch.tensor(4, device=DEVICE)

    def eager(query, new_key, new_value):
        keys, values = (
            tensor.index_copy(2, position.reshape(1), new) for tensor, new in ((key, new_key), (value, new_value))
        )
        return eager_attention(query, keys, values)

    def ours(query, new_key, new_value):
        caches = key.clone(), value.clone()
        return kernel.attention(query, *caches, new_key=new_key, new_value=new_value, position=position)

    tensors = (query, new_key, new_value)
    grads = [torch.autograd.grad(function(*tensors).square().sum(), tensors) for function in (ours, eager)]
    torch.testing.assert_close(*grads)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kernel.attention(*tensors[:1], key, value).dtype == torch.bfloat16
    tables = [random(1, 64, dtype=torch.float32, requires_grad=True) for _ in range(2)]
    rotated = [tensor.detach() for tensor in (query, key, value)]
    new = dict(zip(("new_key", "new_value", "cos", "sin"), [new_key.detach(), new_value.detach(), *tables]))
    out = kernel.attention(*rotated, **new, position=position)
    assert all(grad.any() for grad in torch.autograd.grad(out.square().sum(), tables))
    with torch.no_grad():
        assert not ours(*tensors).requires_grad
    if DEVICE == "cpu":
        # Torch's attention has forward-mode derivatives in its plain form alone.
        detached = [tensor.detach() for tensor in tensors]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            results = [torch.func.jvp(f, (*detached,), (*detached,)) for f in (ours, eager)]
        torch.testing.assert_close(*results)
        stacked = torch.stack([query.detach(), query.detach() * 2])
        results = [
            torch.func.vmap(f, in_dims=(0, None, None))(stacked, key, value)
            for f in (kernel.attention, eager_attention)
        ]
        torch.testing.assert_close(*results)
