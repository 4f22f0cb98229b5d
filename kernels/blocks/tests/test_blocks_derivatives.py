"""Derivatives of accelerated models other than a gradient, beside those of the models themselves."""

import copy

import pytest
import torch
from example_models import accelerated, ltx, qwen3
from graph_models import accelerate_on_cpu, warm
from model_cases import error


def math_attention():
    """The only attention that has all derivatives."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def loss_of(model, inputs, name):
    """Return a function of the parameter `name`, and its value."""
    value = model.get_parameter(name).detach()

    def loss(parameter):
        with math_attention():
            output = torch.func.functional_call(model, {name: parameter}, (), inputs)
        output = output.logits if hasattr(output, "logits") else output[0]
        return output.square().mean()

    return loss, value


def second_backward(loss, value):
    leaf = value.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


WAYS = {
    "jvp": lambda loss, value: torch.func.jvp(loss, (value,), (value.cos(),))[1],
    "grad": lambda loss, value: torch.func.grad(loss)(value),
    "vmap of grad": lambda loss, value: torch.func.vmap(torch.func.grad(loss))(torch.stack((value, 2 * value))),
    "jvp of grad": lambda loss, value: torch.func.jvp(torch.func.grad(loss), (value,), (value.cos(),))[1],
    "second backward": second_backward,
}


@pytest.mark.parametrize("make", [ltx, qwen3])
@pytest.mark.usefixtures("one_thread")
def test_derivatives_are_those_of_the_model(blocks, make):
    model, inputs = make()
    fast = accelerated(blocks, model)
    name = next(name for name, _ in model.named_parameters() if ".0." in name and name.endswith("weight"))
    for way, derive in WAYS.items():
        expected = derive(*loss_of(model, inputs, name))
        assert expected.norm() > 0
        assert error(derive(*loss_of(fast, inputs, name)), expected) < 1e-4, way
    with torch.no_grad():  # a transform has left nothing behind
        actual, expected = (each(**inputs) for each in (fast, model))
    actual, expected = (output[0] if isinstance(output, tuple) else output.logits for output in (actual, expected))
    assert error(actual, expected) < 1e-5


@pytest.mark.usefixtures("one_thread", "no_grad", "kernels_of_the_cpu")
def test_no_graph_replays_where_tangents_matter(blocks):
    model, inputs = ltx()
    expected_model = copy.deepcopy(model)
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)

    def run(model):
        def function(hidden_states):
            with math_attention():
                return model(**{**inputs, "hidden_states": hidden_states})[0]

        return torch.func.jvp(function, (inputs["hidden_states"],), (inputs["hidden_states"],))[1]

    assert error(run(model), run(expected_model)) < 1e-5
    assert counts.eager["forward-mode differentiation or a transform of torch.func is active"] == 1
