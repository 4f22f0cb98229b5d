"""Training steps: the head and its cross entropy in one kernel, and the tensors that a step keeps."""

import pytest
import torch
from model_cases import error
from text_models import TOKENS, model_of
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo", "on_the_device_of_the_kernels")

DOES = "cross entropy with its linear layer"
LABELS = TOKENS.clone()
LABELS[0, :5] = -100


def gradients(model, **options):
    output = model(TOKENS, labels=LABELS, use_cache=False, **options)
    return output.loss, output.logits, torch.autograd.grad(output.loss, list(model.parameters()))


# The mean, and a sum; gemma2 has tied weights and a softcap.
@pytest.mark.parametrize(("name", "options"), [("qwen3", {}), ("gemma2", {"num_items_in_batch": torch.tensor(17)})])
def test_a_training_step_without_logits(blocks, name, options):
    model = model_of(name)
    expected, logits, grads = gradients(model, **options)
    report = blocks.accelerate(model, logits=False)
    loss, none, own = gradients(model, **options)
    assert none is None
    assert {does for _, does in report.replaced} >= {DOES, "RMSNorm"}
    assert error(loss, expected) < 1e-6
    assert max(map(error, own, grads)) < 1e-5
    assert error(model(TOKENS).logits, logits) < 1e-5
    with torch.no_grad():
        assert error(model(TOKENS, labels=LABELS).logits, logits) < 1e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_training_step_under_autocast(blocks, name):
    """As transformers' Trainer runs it with bf16=True: the weights are in float32, products in bfloat16."""
    model = model_of(name)
    _, _, exact = gradients(model)
    with torch.autocast(TOKENS.device.type, torch.bfloat16):
        expected, _, grads = gradients(model)
        report = blocks.accelerate(model, logits=False)
        loss, none, own = gradients(model)
    assert none is None
    assert {does for _, does in report.replaced} >= {DOES, "RMSNorm", "gated activation"}
    assert error(loss, expected) < 1e-3
    for ours, theirs, each in zip(own, grads, exact, strict=True):
        assert error(ours, each) <= 1.5 * error(theirs, each) + 1e-3


def test_logits_stay_by_default_and_the_report_names_the_option(blocks):
    model = model_of("llama")

    def both():
        output = model(TOKENS, labels=LABELS, use_cache=False)
        return output.loss, *torch.autograd.grad(output.loss + output.logits.square().mean(), list(model.parameters()))

    expected = both()
    report = blocks.accelerate(model)
    assert max(map(error, both(), expected)) < 1e-4  # those of the biases of keys are rounding alone
    assert ("LlamaForCausalLM", DOES) in report.replaced
    [reason] = [reason for _, reason in report.left if "logits" in reason]
    assert "accelerate(model, logits=False)" in reason


LOSSES = {
    "smoothed": lambda rows, labels: F.cross_entropy(rows, labels, label_smoothing=0.1, ignore_index=3),
    "weighted": lambda rows, labels: F.cross_entropy(rows, labels, torch.linspace(1, 2, 40, device=rows.device)),
    "each row": lambda rows, labels: F.cross_entropy(rows, labels, reduction="none").amax(),
    "shares": lambda rows, labels: F.cross_entropy(rows, F.one_hot(labels, 40).float()),
    "folded": lambda rows, labels: F.cross_entropy(rows.reshape(-1, 20), labels.repeat_interleave(2) % 20),
    "used": lambda rows, labels: F.cross_entropy(rows, labels) + rows.square().mean(),
    "used behind a graph break": F.cross_entropy,
    "scalars": lambda rows, labels: (
        F.silu(loss := F.cross_entropy(rows, labels)) * (loss * torch.rsqrt(loss.square().mean(-1, keepdim=True) + 1))
    ),
}


LEFT = "weighted", "each row", "shares", "folded", "used"


class Head(nn.Module):
    """A head, on a norm with scalars as modulation, that returns its loss alone."""

    def __init__(self, kind, dtype):
        super().__init__()
        self.norm, self.linear, self.kind = nn.RMSNorm(16, dtype=dtype), nn.Linear(16, 40, dtype=dtype), kind

    def forward(self, x, target):
        scale, shift = self.linear.bias[:2].unbind()
        rows = self.linear(self.norm(x) * (1 + scale) + shift).flatten(0, 1).float()
        loss = LOSSES[self.kind](rows, target.flatten())
        if self.kind != "used behind a graph break":
            return loss
        torch._dynamo.graph_break()
        return loss + rows.square().mean()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_losses_that_the_kernel_computes_are_replaced(blocks, kind, dtype):
    model, x, target = Head(kind, dtype), torch.randn(2, 6, 16, dtype=dtype), torch.randint(40, (2, 6))
    expected = model(x, target)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    report = blocks.accelerate(model, logits=False)
    actual = model(x, target)
    assert (("Head", DOES) in report.replaced) == (kind not in LEFT)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert max(map(error, (actual, *torch.autograd.grad(actual, list(model.parameters()))), (expected, *grads))) < bound


class Product(nn.Module):
    def forward(self, x, weight, target):
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


class Caller(nn.Sequential):
    """A module with a graph break that Torch cannot resume, in a `try`."""

    def forward(self, *inputs):
        try:
            loss, logits = self[0](*inputs)
            torch._dynamo.graph_break()
        finally:
            pass
        return loss, logits + 1


@pytest.mark.parametrize("make", [Product, lambda: Caller(Product())])
def test_logits_behind_a_graph_break_are_returned_and_sizes_may_be_symbols(blocks, make):
    model, own = make(), make()
    blocks.accelerate(model, logits=False)
    for elements in (16, 24):
        weight, target = torch.randn(40, elements, requires_grad=True), torch.randint(40, (2, 6))
        inputs = torch.randn(2, 6, elements), weight, target
        (loss, logits), (expected, its_logits) = model(*inputs), own(*inputs)
        assert error(loss, expected) < 1e-5
        assert logits is None if make is Product else error(logits, its_logits) < 1e-5


class Gated(nn.Module):
    def __init__(self, bias, joined):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16, bias=bias)
        self.both = nn.Linear(16, 48) if joined else None

    def forward(self, x):
        if self.both is not None:
            up, gate = self.both(x).chunk(2, dim=-1)
            return self.down(F.gelu(gate) * up)
        return self.down(F.silu(self.gate(x)) * self.up(x))


def second_derivatives(model, x):
    output = model(x)
    first = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    used = [parameter for name, parameter in model.named_parameters() if ("both" in name) != (model.both is None)]
    used += [*model.down.parameters()]
    return output, *first, *torch.autograd.grad(output.sum() + first[0].square().sum(), [x, *used])


@pytest.mark.parametrize(("joined", "shape"), [(False, (2, 5, 16)), (True, (2, 5, 16)), (True, (16,))])
@pytest.mark.parametrize("bias", [False, True])
def test_derivatives_of_a_feed_forward_that_computes_its_product_again(blocks, bias, joined, shape):
    model, x = Gated(bias, joined), torch.randn(shape, requires_grad=True)
    expected = second_derivatives(model, x)
    report = blocks.accelerate(model)
    assert max(map(error, second_derivatives(model, x), expected)) < 1e-5
    assert report.replaced == {("Gated", "gated activation"): 1}
    model.requires_grad_(False)
    for frozen, own in zip(torch.autograd.grad(model(x).square().sum(), x), expected[1:]):
        assert error(frozen, own) < 1e-5


@pytest.mark.parametrize("returns_logits", [False, True])
def test_a_step_keeps_neither_products_nor_copies_nor_logits(blocks, returns_logits):
    # In float32, attention on a GPU would get copies of keys and values.
    model = model_of("llama", intermediate_size=112).bfloat16().train()
    blocks.accelerate(model, logits=returns_logits)
    gradients(model)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        model(TOKENS, labels=LABELS, use_cache=False)
    shapes = [tuple(tensor.shape) for tensor in kept.values() if tensor.dim()]
    assert len([shape for shape in shapes if shape[-1] == 112 and shape[0] != 64]) == 4  # two operands in two layers
    assert len([shape for shape in shapes if shape == (2, 2, 12, 16)]) == 4  # keys and values of two heads
    assert not [shape for shape in shapes if shape[-1] == 99 and shape != (64, 99)]  # the weight, transposed
