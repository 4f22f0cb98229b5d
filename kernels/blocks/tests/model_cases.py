"""Small random models with inputs for them, and how far their results and gradients are from others."""

import copy
import importlib
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Case:
    """A model and its inputs. `whole`: inputs that keep their dtype in a model of bfloat16."""

    model: Any
    inputs: dict[str, Any]
    whole: tuple[str, ...] = ()

    def inputs_in(self, dtype: torch.dtype) -> dict[str, Any]:
        def cast(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cast(part) for name, part in value.items()}
            if isinstance(value, list):
                return [cast(part) for part in value]
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return {name: value if name in self.whole else cast(value) for name, value in self.inputs.items()}

    def in_dtype(self, dtype: torch.dtype) -> "Case":
        return Case(nn.Module.to(copy.deepcopy(self.model), dtype), self.inputs_in(dtype), self.whole)

    def run(self) -> Tensor:
        """Return the outputs as one vector of float32."""
        outputs = self.model(**self.inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return torch.cat([output.float().flatten() for output in outputs if output is not None])


def randomized(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Give values that matter to weights of ones or zeros: those of norms and of some last layers, and biases."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or not parameter.any():
                parameter.add_(torch.randn_like(parameter), alpha=scale)
            # So that bfloat16 and float32 models have the same parameters.
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def error(actual, expected):
    """Return the norm of the difference, divided by that of the expected values."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def built(build, seed=0):
    torch.manual_seed(seed)
    return build()


class RecordedModel:
    """Calls a model by the recorded calls of its forward, with the kernels in place of some.

    CUDA graphs hold the same calls, and Dynamo's graphs the same replacements, after a trace of some seconds. It traces
    the models that read elements of tensors, which cannot be recorded. The model itself has to run before, as it does
    before a capture: it may keep tensors that its first call computes.
    """

    def __init__(self, blocks, model):
        self.blocks, self.model = blocks, model

    def __call__(self, *args, **kwargs):
        try:
            recording = recorded(self.blocks, self.model, args, kwargs)
        except importlib.import_module(f"{self.blocks.__name__}.recording").Refused:
            return self._traced(args, kwargs)
        self.graph = recording.module.graph
        return recording.run(*args, **kwargs)

    def _traced(self, args, kwargs):
        fuse = importlib.import_module(f"{self.blocks.__name__}.fusions").fuse
        self.graph = SimpleNamespace(nodes=[])

        def backend(module, inputs):
            fuse(module)
            self.graph.nodes += module.graph.nodes
            return module.forward

        torch._dynamo.reset()
        return torch.compile(self.model, backend=backend)(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)

    @property
    def kernels(self):
        """How often the last call's graph has each function of a kernel."""
        known = importlib.import_module(f"{self.blocks.__name__}.fusions").KERNELS_OF
        return Counter(node.target.__name__ for node in self.graph.nodes if node.target in known)


def recorded(blocks, model, args, kwargs):
    """Return the recorded calls of a model's forward, with the kernels."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # as in decoding steps: others read elements of tensors
    record = importlib.import_module(f"{blocks.__name__}.recording").record
    recording = record(type(model), model.forward, args, kwargs)
    importlib.import_module(f"{blocks.__name__}.fusions").fuse(recording.module)
    return recording


def accelerated(blocks, case):
    return Case(RecordedModel(blocks, case.model), case.inputs, case.whole)
