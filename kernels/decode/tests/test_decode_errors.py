"""Every error names the argument."""

import pytest
import torch
from reference_decode import kernel, ops
from testing import DEVICE, gpu

# Those of float16 are served by the kernel on every device.
F16, F32 = torch.float16, torch.float32


def zeros(*shape, dtype=F16):
    return torch.zeros(shape, dtype=dtype)


X, WEIGHT = zeros(2, 16), zeros(4, 16)
LINEAR = [
    ("x must have at least one dimension", [zeros(), WEIGHT]),
    ("x must be float32, float16 or bfloat16", [X.double(), WEIGHT]),
    ("x must have at least one element in its last dimension", [zeros(2, 0), zeros(4, 0)]),
    ("x must have at most 8 rows, not 9", [zeros(3, 3, 16), WEIGHT]),
    ("weight must have the dtype of x", [X, WEIGHT.float()]),
    (r"weight must have shape \[outputs, 16\], not \[4, 8\]", [X, zeros(4, 8)]),
    (r"weight must have shape \[outputs, 16\], not \[16\]", [X, zeros(16)]),
    (r"bias must have shape \[4\], not \[4, 1\]", [X, WEIGHT, zeros(4, 1)]),
    ("bias must have the dtype of x", [X, WEIGHT, zeros(4, dtype=F32)]),
    (r"residual must have shape \[2, 4\], not \[4\]", [X, WEIGHT, None, zeros(4)]),
    ("residual must have the dtype of x", [X, WEIGHT, None, zeros(2, 4, dtype=F32)]),
    (r"weight2 must have shape \[outputs, 16\], not \[4, 8\]", [X, WEIGHT, None, None, zeros(4, 8)]),
    (r"bias3 must have shape \[4\], not \[5\]", [X, WEIGHT, None, None, WEIGHT, None, WEIGHT, zeros(5)]),
    ("weight2 is required by the arguments after it", [X, WEIGHT, None, None, None, None, WEIGHT]),
    ("weight3 is required by the arguments after it", [X, WEIGHT, None, None, WEIGHT, None, None, zeros(4)]),
]
GATED = [
    (r"gate_weight must have shape \[outputs, 16\], not \[4, 8\]", [X, zeros(4, 8), WEIGHT, 1]),
    (r"up_weight must have shape \[4, 16\], not \[5, 16\]", [X, WEIGHT, zeros(5, 16), 1]),
    (r"gate_bias must have shape \[4\], not \[5\]", [X, WEIGHT, WEIGHT, 1, zeros(5)]),
    (r"up_bias must have shape \[4\], not \[5\]", [X, WEIGHT, WEIGHT, 1, None, zeros(5)]),
]
QUERY, KEY, NEW = zeros(2, 4, 1, 16), zeros(2, 2, 5, 16), zeros(2, 2, 1, 16)
MASK, POSITION = torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
ATTENTION = [
    (r"query must have shape \[batch, query_heads, 1, elements\], not \[2, 4, 16\]", [QUERY[:, :, 0], KEY, KEY]),
    (r"query must have shape \[batch, query_heads, 1, elements\], not \[2, 4, 2, 16\]", [zeros(2, 4, 2, 16), KEY, KEY]),
    ("query must be float32, float16 or bfloat16", [QUERY.double(), KEY, KEY]),
    ("query must have a multiple of 8 elements per head, at most 256, not 12", [QUERY[..., :12], KEY, KEY]),
    ("query must have a multiple of 8 elements per head, at most 256, not 264", [zeros(2, 4, 1, 264), KEY, KEY]),
    (r"key must have shape \[2, key_heads, tokens, 16\], not \[1, 2, 5, 16\]", [QUERY, KEY[:1], KEY]),
    ("key must have the dtype of query", [QUERY, KEY.float(), KEY]),
    ("query must have a multiple of the 2 heads of key, not 3", [QUERY[:, :3], KEY, KEY]),
    (r"value must have shape \[2, 2, 5, 16\], not \[2, 2, 4, 16\]", [QUERY, KEY, KEY[:, :, :4]]),
    ("value must have the dtype of key", [QUERY, KEY, KEY.float()]),
    ("mask must be bool", [QUERY, KEY, KEY, MASK.half()]),
    (r"mask must have shape \[2 or 1, 1, 1, 5\], not \[2, 5\]", [QUERY, KEY, KEY, MASK[:, 0, 0]]),
    (r"mask must have shape \[2 or 1, 1, 1, 5\], not \[2, 1, 1, 4\]", [QUERY, KEY, KEY, MASK[..., :4]]),
]
CACHED = [
    (r"new_key must have shape \[2, 2, 1, 16\], not \[2, 2, 2, 16\]", [QUERY, KEY[:, :, :2], NEW, KEY, KEY, POSITION]),
    ("new_key must have the dtype of query", [QUERY, NEW.float(), NEW, KEY, KEY, POSITION]),
    (r"new_value must have shape \[2, 2, 1, 16\], not \[1, 2, 1, 16\]", [QUERY, NEW, NEW[:1], KEY, KEY, POSITION]),
    ("position must be one int64", [QUERY, NEW, NEW, KEY, KEY, POSITION.int()]),
    ("position must be one int64", [QUERY, NEW, NEW, KEY, KEY, POSITION.expand(2)]),
]


@pytest.mark.kernels_ci
def test_errors_name_the_argument():
    def move(argument):
        return argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument

    for op, cases in (
        (ops.linear.default, LINEAR),
        (ops.gated_linear.default, GATED),
        (ops.attention.default, [(message, [*given, *[None] * (4 - len(given)), 0.5]) for message, given in ATTENTION]),
        (ops.cached_attention.default, [(message, [*given, None, 0.5]) for message, given in CACHED]),
    ):
        for message, arguments in cases:
            with pytest.raises(RuntimeError, match=f"decode: {message}"):
                op(*map(move, arguments))


def test_choices_are_checked():
    x, weight = X.to(DEVICE), WEIGHT.to(DEVICE)
    with pytest.raises(ValueError, match=r"activation must be one of .*, not 'relu'"):
        kernel.gated_linear(x, weight, weight, activation="relu")
    for activation in (0, 4):
        with pytest.raises(RuntimeError, match=f"activation must be .*, not {activation}"):
            ops.gated_linear(x, weight, weight, activation)
    for message, function, *arguments in (
        ("weights must be one to three tensors, not 0", kernel.linears, x, []),
        ("weights must be one to three tensors, not 4", kernel.linears, x, [weight] * 4),
        ("biases must be 2, one for each weight, not 1", kernel.linears, x, [weight, weight], [None]),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    query, key, position = QUERY.to(DEVICE), KEY.to(DEVICE), POSITION.to(DEVICE)
    new, row = NEW.to(DEVICE), torch.ones(1, 16, device=DEVICE)
    token = {"new_key": new, "new_value": new, "position": position}
    for message, options in (
        ("new_key, new_value and position must be given together", {"position": position}),
        ("and with constant_cache", {"constant_cache": True}),
        ("new_key, new_value and position must be given", {"cos": row, "sin": row}),
        ("cos and sin must be given together", {"cos": row, **token}),
        ("cos and sin must be given together, and with weights", {"key_weight": row[0], **token}),
        ("query_weight and key_weight must be given together", {"cos": row, "sin": row, "key_weight": row[0], **token}),
        ("rounding must be .*, not 'first'", {"cos": row, "sin": row, "rounding": "first", **token}),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.attention(query, key, key, **options)


def test_caches_that_cannot_be_written():
    query, key, new, position = (tensor.to(DEVICE) for tensor in (QUERY, KEY, NEW, POSITION))
    for message, cache in (
        ("key must have adjacent elements in its last dimension", torch.stack([key, key], -1)[..., 0]),
        ("key must not be expanded", key[:1].expand(2, 2, 5, 16)),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernel.attention(query, cache, key, new_key=new, new_value=new, position=position)
    if DEVICE == "cpu":
        for wrong in (-1, 5):
            with pytest.raises(RuntimeError, match=f"position must be a token of the 5 of key, not {wrong}"):
                kernel.attention(query, key, key, new_key=new, new_value=new, position=position + wrong)


@gpu
def test_errors_name_the_argument_on_another_device():
    x, weight, query, key = (tensor.to(DEVICE) for tensor in (X, WEIGHT, QUERY, KEY))
    for error, message, function, *tensors in (
        (RuntimeError, "weight must be on the device of x", kernel.linear, x, weight.cpu()),
        (RuntimeError, "value must be on the device of key", kernel.attention, query, key, key.cpu()),
        (RuntimeError, "query must have at most 65535", kernel.attention, *[query[:1].expand(65536, 4, 1, 16)] * 3),
        (RuntimeError, "norm_weight is for bfloat16", ops.linear, x, weight, *[None] * 6, False, weight[0]),
        (NotImplementedError, 'backend="cpu"', kernel.linear, x.cpu(), weight.cpu()),
        (NotImplementedError, 'backend="cpu"', kernel.attention, query.cpu(), key.cpu(), key.cpu()),
    ):
        with pytest.raises(error, match=message):
            function(*tensors)
