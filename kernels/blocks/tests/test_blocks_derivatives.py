"""Derivatives of accelerated models other than a gradient, beside those of the models themselves."""

import copy

import pytest
import torch
from example_models import accelerated, own
from graph_models import accelerate_on_cpu, ltx, ltx_inputs, warm
from model_cases import error

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("trained", ["layers.0.norm.weight", "layers.0.gated.weight"])
@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_the_model(blocks, way, trained):
    model, inputs = own()
    fast = accelerated(blocks, model)
    results = []
    for each in (model, fast):

        def loss(parameter, each=each):
            return torch.func.functional_call(each, {trained: parameter}, (), inputs).square().mean()

        results.append(WAYS[way](loss, model.get_parameter(trained).detach()))
    assert results[0].norm() > 0 and error(results[1], results[0]) < 1e-4
    with torch.no_grad():  # a transform has left nothing behind
        assert error(fast(**inputs), model(**inputs)) < 1e-5


@pytest.mark.usefixtures("no_grad", "kernels_of_the_cpu")
def test_no_graph_replays_where_tangents_matter(blocks):
    model, inputs = ltx(), ltx_inputs()
    expected_model = copy.deepcopy(model)
    counts = accelerate_on_cpu(blocks, model)
    warm(model, counts, inputs)

    def tangent(model):
        def function(hidden_states):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the only one with a jvp
                return model(**{**inputs, "hidden_states": hidden_states}).sample

        return torch.func.jvp(function, (inputs["hidden_states"],), (inputs["hidden_states"],))[1]

    assert error(tangent(model), tangent(expected_model)) < 1e-5
    assert counts.eager["a function mode, forward-mode differentiation or a transform of torch.func is active"] == 1
