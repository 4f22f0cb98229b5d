"""Test that recorded calls of Torch do as the forward does, and that forwards that do more are not recorded."""

import re

import numpy
import pytest
import torch
from graph_models import Wrapped, module_of
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "kernels_of_the_cpu")

X = torch.linspace(-2, 2, 24).view(4, 6)
SCALE = torch.tensor(3.0)


@torch.jit.script
def scripted(x):
    return x * 2


def in_place(x):
    y = x.clone()
    y[1:, ::2] = 5
    y += x
    y.mul_(2).clamp_(max=4)
    torch.add(x, 1, out=y[:])
    return y, y.t(), x.unbind(0)[2]


def with_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            y = y, x @ x.t()
    return *y, x @ x.t()


RECORDED = {
    "autocast": with_autocast,
    "operators": lambda x: (2 - x, 2 / (x + 3), 2**x, -x, x @ x.t(), x % 2, (x > 0) & (x < 1) | ~(x == 0)),
    "in place": in_place,
    "several results": lambda x: [*x.chunk(2), *torch.max(x, 1), {"mean": x.mean(), "size": x.shape[0]}],
    "constants": lambda x: x * SCALE + torch.arange(6),
    "attributes": lambda x: x.mT.data + x.real.T,
    "functions": lambda x: F.gelu(F.layer_norm(x, (6,)), approximate="tanh").to(torch.float64).float(),
    "no operation": lambda x: x.to(torch.float32).contiguous(),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "a compiled part": torch.compile(lambda x: x.sin() + 1, backend="eager"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_calls_do_as_the_forward(blocks, name):
    forward = RECORDED[name]
    recording = module_of(blocks, "recording").record(nn.Module, forward, (X.clone(),), {})
    for x in (X, X + 1):
        torch.manual_seed(0)
        expected = forward(x.clone())
        torch.manual_seed(0)
        actual = recording.run(x.clone())
        for ours, own in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
            assert torch.equal(ours, own) if isinstance(own, torch.Tensor) else ours == own


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x + torch.from_numpy(x.numpy() * 2), ".numpy() is not supported"),
        (lambda x: x + torch.from_numpy(numpy.ones(6)), "other code than Python calls aten.lift_fresh"),
        (lambda x: x.data_ptr() and x + 1, "RuntimeError: Cannot access data pointer of Tensor"),
        (lambda x: x if x.sum() > 0 else -x, "DataDependentOutputException: aten._local_scalar_dense.default"),
        (lambda x: scripted(SCALE.mul_(2)) + x, "other code than Python calls aten.mul"),
        (lambda x: x.clone().t_(), "it changes the shape of a tensor in place (aten.t_.default)"),
        (scripted, "other code than Python calls aten.mul"),
        (torch.vmap(lambda row: row * 2), "it uses a transform of torch.func"),
        (lambda x: x.to_sparse().to_dense(), "it makes a FakeTensor, torch.sparse_coo"),
    ],
)
def test_forwards_that_do_more_are_not_recorded(blocks, forward, reason):
    recording = module_of(blocks, "recording")
    with pytest.raises(recording.Refused, match=re.escape(reason)):
        recording.record(nn.Module, forward, (X.clone(),), {})
    assert torch.equal(SCALE, torch.tensor(3.0))


def test_modules_of_calls(blocks):
    model = Wrapped(nn.Linear(6, 6))
    recording = module_of(blocks, "recording").record(Wrapped, model.forward, (X,), {})
    (linear,) = (node for node in recording.module.graph.nodes if node.op == "call_function")
    assert [cls for _, cls in linear.meta["nn_module_stack"].values()] == [nn.Linear]
