"""Small random models with inputs for them, and how far their results and gradients are from others."""

import copy
import importlib
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SEEDS = range(2)


@dataclass
class Case:
    """A model and its inputs. `whole`: inputs that keep their dtype in a model of bfloat16."""

    model: Any
    inputs: dict[str, Any]
    whole: tuple[str, ...] = ()

    def in_dtype(self, dtype: torch.dtype) -> "Case":
        def cast(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cast(part) for name, part in value.items()}
            if isinstance(value, list):
                return [cast(part) for part in value]
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        inputs = {name: value if name in self.whole else cast(value) for name, value in self.inputs.items()}
        return Case(nn.Module.to(copy.deepcopy(self.model), dtype), inputs, self.whole)

    def run(self) -> Tensor:
        """Return the outputs as one vector of float32."""
        outputs = self.model(**self.inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return torch.cat([output.float().flatten() for output in outputs if output is not None])


def randomized(model: nn.Module) -> nn.Module:
    """Give the weights of norms and the biases, which are ones and zeros in a new model, values that matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            # So that bfloat16 and float32 models have the same parameters.
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


def built(build, seed=0):
    torch.manual_seed(seed)
    return build()


class RecordedModel:
    """Calls a model by the recorded calls of its forward, with the kernels in place of some.

    CUDA graphs hold the same calls, and Dynamo's graphs the same replacements, after a trace of some seconds.
    """

    def __init__(self, blocks, model):
        self.blocks, self.model = blocks, model

    def __call__(self, *args, **kwargs):
        recording, self.misses = recorded(self.blocks, self.model, args, kwargs)
        self.graph = recording.module.graph
        return recording.run(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)

    @property
    def kernels(self):
        """How often the last call's graph has each function of a kernel."""
        known = importlib.import_module(f"{self.blocks.__name__}.fusions").KERNELS_OF
        return Counter(node.target.__name__ for node in self.graph.nodes if node.target in known)


def recorded(blocks, model, args, kwargs):
    """Return the recorded calls of a model's forward, with the kernels, and the operations almost replaced."""
    recording = importlib.import_module(f"{blocks.__name__}.recording").Recording(type(model))
    recording.record(model.forward, args, kwargs)
    assert recording.obstacle is None, recording.obstacle
    return recording, importlib.import_module(f"{blocks.__name__}.fusions").fuse(recording.module)


def accelerated(blocks, case):
    return Case(RecordedModel(blocks, case.model), case.inputs, case.whole)


def gradients(case):
    """Return the gradients of the parameters, and of the inputs that have one."""
    inputs = {}
    for name in ("hidden_states", "encoder_hidden_states"):
        inputs[name] = case.inputs[name].clone().requires_grad_()
    # Not by cuDNN: for so few tokens it gives wrong or infinite gradients, also in models' own forwards (Torch 2.11).
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        outputs = Case(case.model, case.inputs | inputs).run()
        torch.manual_seed(1)
        tensors = [*case.model.parameters(), *inputs.values()]
        return torch.autograd.grad(outputs, tensors, torch.randn_like(outputs), allow_unused=True)


def error_ratio(ours, own, expected):
    """Return the geometric mean over all gradients: some of them, as that of a bias of k, are little but rounding."""
    ratios = [
        error(gradient.float(), reference) / error(other.float(), reference)
        for gradient, other, reference in zip(ours, own, expected)
        if reference is not None and reference.norm() > 1e-6
    ]
    assert len(ratios) > 10
    return statistics.geometric_mean(ratios)


# --- tests of every model --------------------------------------------------------------------------------------------


@torch.no_grad()
def check_output(blocks, build):
    """Assert that float32 output stays, and bfloat16 is as close to it as by the model's own forwards.

    Return how often the float32 model's graph has each kernel.
    """
    own, ours = 0.0, 0.0
    for seed in SEEDS:
        case = built(build, seed)
        expected = case.run()
        if seed == 0:
            faster = accelerated(blocks, case)
            assert error(faster.run(), expected) < 1e-5
        lower = case.in_dtype(torch.bfloat16)
        own += error(lower.run(), expected) ** 2
        ours += error(accelerated(blocks, lower).run(), expected) ** 2
    assert 0 < ours <= 1.1**2 * own
    return faster.model.kernels


def check_bfloat16_gradients(blocks, build):
    """Assert that gradients are as close to those of the float32 model as those of the model's own forwards."""
    case = built(build)
    expected = gradients(case)
    lower = case.in_dtype(torch.bfloat16)
    own = gradients(lower)
    assert error_ratio(gradients(accelerated(blocks, lower)), own, expected) <= 1.1


def check_float32_gradients(blocks, build):
    """Assert that gradients are those of the model."""
    case = built(build)
    expected = gradients(case)
    actual = gradients(accelerated(blocks, case))
    for ours, own in zip(actual, expected):
        assert (ours is None) == (own is None)
        if own is not None:
            torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5 * own.abs().max().item() + 1e-7)
