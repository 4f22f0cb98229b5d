"""Test the ops of norm_rotary with torch.library.opcheck and torch.compile, and their errors."""

import pytest
import torch
from reference_norm_rotary import FORMS, angles, heads_of, tables
from reference_rope3d import kernel, ops
from testing import DEVICE, assert_replays, random

EPS = 1e-6


@pytest.mark.parametrize(("per_token", "dtype"), [(False, torch.float32), (True, torch.float16)])
def test_opcheck(per_token, dtype):
    (q, k), weights = heads_of(3, 2, 16, dtype, norm="token" if per_token else "head")
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    cos, sin = tables(angles(2, 6, 16))
    options = (EPS, per_token, 1.0, dtype == torch.float16, 0, 1, 0, False, False)
    for given in ((q, k, *weights), (q, None, None, None), (q, k, None, weights[1].float())):
        for grad in (False, True):
            leaves = [None if t is None else t.detach().requires_grad_(grad) for t in given]
            torch.library.opcheck(ops.norm_rotate.default, (*leaves, cos, sin, *options))
    grads = torch.randn_like(q), torch.randn_like(k)
    for of_q, of_k in ((True, True), (False, True), (True, False)):
        given = grads[0] if of_q else None, grads[1] if of_k else None
        arguments = (*given, of_q, of_k, q, k, *weights, cos, sin, *options)
        torch.library.opcheck(ops.norm_rotate_backward.default, arguments)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(("norm", "half"), [("head", True), ("token", False)])
def test_compile(norm, half):
    def block(q, k, q_weight, k_weight, cos, sin):
        options = {"norm": norm, "pairs": "half" if half else "interleaved", "prefix": 2}
        q, k = kernel.norm_rotary(q * 2, k, q_weight, k_weight, cos, sin, **options)
        return q + 1, k

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, tokens in ((4, 50), (9, 62)):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            inputs, weights = heads_of(3, 2, 32, torch.float32, batch, tokens, norm=norm)
            leaves = [t.requires_grad_() for t in (*inputs, *weights)]
            cos, sin = tables(angles(tokens - 2, 32))
            expected, actual = block(*leaves, cos, sin), compiled(*leaves, cos, sin)
            torch.testing.assert_close(actual, expected)
            grads = [torch.randn_like(e) for e in expected]
            torch.testing.assert_close(
                torch.autograd.grad(actual, leaves, grads), torch.autograd.grad(expected, leaves, grads)
            )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    cos, sin = tables(angles(7, 64))
    compiled = torch.compile(lambda q: kernel.norm_rotary(q + 1, q, None, None, cos, sin), fullgraph=True, dynamic=True)
    for batch in (4, 9):
        q = random(batch, 7, 3, 128, dtype=torch.bfloat16)
        for actual, expected in zip(compiled(q), kernel.norm_rotary(q + 1, q, None, None, cos, sin)):
            torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_graph(norm, half):
    """A CUDA graph of the forward and the backward pass, replayed on other values."""
    inputs, weights = heads_of(8, 4, 128, torch.bfloat16, 1, 300, norm=norm)
    leaves = [t.requires_grad_() for t in (*inputs, *weights)]
    cos, sin = tables(angles(300, 64))

    def step():
        outs = kernel.norm_rotary(*leaves, cos, sin, norm=norm, pairs="half" if half else "interleaved")
        return *outs, *torch.autograd.grad(outs, leaves, [out.detach() for out in outs])

    assert_replays(step, leaves[0])


def assert_refused(message, changes):
    given = {"q": torch.zeros(2, 6, 4, 8), "k": torch.zeros(2, 6, 2, 8), "q_weight": torch.zeros(8)}
    given = {**given, "k_weight": torch.zeros(8), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4), **changes}
    with pytest.raises(RuntimeError, match=message):
        kernel.norm_rotary(**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q_weight must have shape \[8\], not \[7\]", {"q_weight": torch.zeros(7)}),
        (r"q_weight must have shape \[32\], not \[8\]", {"norm": "token"}),
        (r"k_weight must have shape \[8\], not \[1, 8\]", {"k_weight": torch.zeros(1, 8)}),
        (r"k_weight must have shape \[16\], not \[8\]", {"norm": "token", "q_weight": torch.zeros(32)}),
        ("k_weight must have the dtype of q, or float32", {"k_weight": torch.zeros(8, dtype=torch.float16)}),
        ("q_weight must be float32, float16 or bfloat16", {"q_weight": torch.zeros(8, dtype=torch.float64)}),
        ("k_weight must be None without k", {"k": None}),
    ],
)
def test_errors_name_the_argument(message, changes):
    assert_refused(message, changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"grad_q must have shape \[2, 6, 4, 8\], not \[2, 6, 2, 8\]", {"grad_q": torch.zeros(2, 6, 2, 8)}),
        ("grad_k must have the dtype of k", {"grad_k": torch.zeros(2, 6, 2, 8, dtype=torch.float16)}),
        ("grad_k must be None without k", {"k": None, "k_weight": None}),
        ("q_weight must be given for its gradient", {"q_weight": None}),
        ("q_weight has a gradient only with that of the result", {"grad_q": None}),
    ],
)
def test_errors_of_the_backward_pass(message, changes):
    q, k = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)
    given = {"grad_q": q, "grad_k": k, "of_q_weight": True, "of_k_weight": False, "q": q, "k": k, "eps": EPS}
    given = {
        **given,
        "q_weight": torch.zeros(8),
        "k_weight": torch.zeros(8),
        "cos": torch.zeros(6, 4),
        "sin": torch.zeros(6, 4),
    }
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in {**given, **changes}.items()}
    with pytest.raises(RuntimeError, match=message):
        ops.norm_rotate_backward(**given)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("norm must be", {"norm": "batch"}),
        ("rounding must be", {"rounding": "first"}),
    ],
)
def test_wrong_values(message, changes):
    q, table = torch.zeros(2, 6, 4, 8, device=DEVICE), torch.zeros(6, 4, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        kernel.norm_rotary(q, None, None, None, table, table, **changes)
