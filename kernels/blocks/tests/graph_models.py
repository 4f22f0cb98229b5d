"""Small models for the tests of CUDA graphs, and a stand-in for CUDA on machines without it."""

import contextlib
import copy
import importlib

import small_models
import torch
from model_cases import error
from text_models import model_of
from torch import nn
from torch.utils._pytree import tree_leaves

FIRST = "the first call of its shape"
"""Why an accelerated model runs eagerly then."""


def ltx():
    return small_models.ltx().model.requires_grad_(False)


def ltx_inputs(frames=2, dtype=torch.float32):
    inputs = small_models.ltx(num_layers=1, frames=frames).inputs_in(dtype)
    return {name: value for name, value in inputs.items() if name != "return_dict"}


def llama():
    return model_of("llama").requires_grad_(False)


def decode(model, cache, steps, device="cpu"):
    """Return the tokens that `model` finds greedily after a short prompt."""
    tokens = torch.arange(5, device=device)[None]
    decoded = []
    for _ in range(steps):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        tokens = logits[:, -1:].argmax(-1)
        decoded.append(tokens)
    return torch.cat(decoded, 1)


def module_of(blocks, name):
    return importlib.import_module(f"{blocks.__name__}.{name}")


def accelerate_on_cpu(blocks, model, limit=8, error=None):
    """Accelerate `model` with graphs that the CPU "captures": a replay runs the forward again, on the same tensors.

    Only the class that calls CUDA is another one. With `error`, every capture fails with it.
    """
    calls, generation, gpu, graphs = (module_of(blocks, name) for name in ("calls", "generation", "gpu", "graphs"))

    class Cpu(gpu.Gpu):
        type = "cpu"

        def find_obstacle(self, device):
            return None

        def new_pool(self):
            return None

        def capture(self, run, pool, device):
            if error is not None:
                raise calls.Refused(error)
            output = run()
            runs = []

            def replay():
                runs.append(None)
                if len(runs) > 1:  # the capture was the first run: on a GPU it computes nothing
                    for old, new in zip(tree_leaves(output), tree_leaves(run())):
                        if isinstance(old, torch.Tensor):
                            old.copy_(new)

            return replay, output, 0

        def in_order(self, device):
            return contextlib.nullcontext()

        def send(self, tensor):
            copy = tensor.clone()
            return lambda: copy

        def memory(self, device):
            return 2**40

    report = blocks.accelerate(model, graphs=True)
    runner = graphs.GraphRunner(model, report, limit, Cpu())
    graphs.runners[model] = runner
    decoders = graphs.decoders
    for module in set(decoders) & set(model.modules()):
        decoders[module] = generation.Decoder(type(module), report, Cpu())
    return runner.counts


def warm(model, counts, inputs):
    """Call a model until a graph is held."""
    for _ in range(3):
        model(**inputs)
    assert counts.held == 1, counts


def accelerated_ltx(blocks):
    """Return a model that the CPU "captures", a call's arguments, and its counts."""
    model = ltx()
    return model, ltx_inputs(), accelerate_on_cpu(blocks, model)


def captured_ltx(blocks):
    """Return the same with a graph."""
    model, inputs, counts = accelerated_ltx(blocks)
    warm(model, counts, inputs)
    return model, inputs, counts


def eager(model, inputs):
    """Return a model's outputs without graphs: copies have none."""
    return copy.deepcopy(model)(**inputs)


def is_same(actual, expected):
    """Return whether outputs differ by rounding only: graphs have the kernels, other calls the model's operations."""
    return error(actual, expected) < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[expected.dtype]


def ltx_on_gpu(dtype=torch.bfloat16, device="cuda"):
    return ltx().to(device, dtype)


def inputs_on_gpu(frames=2, dtype=torch.bfloat16, device="cuda"):
    inputs = ltx_inputs(frames, dtype)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def graphed(blocks, model):
    """Accelerate a model with graphs, and return their counts."""
    report = blocks.accelerate(model, graphs=True)
    (counts,) = report.graphs.values()
    return counts


def without_graphs(blocks, model, inputs):
    """Return a model's outputs without graphs."""
    graphs = module_of(blocks, "graphs")
    runner = graphs.runners.pop(model)
    try:
        return model(**inputs)
    finally:
        graphs.runners[model] = runner


class Wrapped(nn.Module):
    """A model with one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)
