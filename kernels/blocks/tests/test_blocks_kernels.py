"""Each replacement calls the kernels that it declares, and no others."""

import pytest
import small_image_models
import small_video_models
import torch
from diffusers.models.activations import SwiGLU
from model_cases import built
from test_blocks_norms import NORMS, WIDTH, norm_named
from text_models import CONFIGS, PADDED, TOKENS, model_of
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels", "no_grad")

DIFFUSERS = {**small_image_models.CASES, **small_video_models.CASES}


class KernelCalls(TorchDispatchMode):
    """Records which kernels' ops the forwards of replacements call, without those of replaced modules inside.

    Attributes:
        kernels: By replacement whose forward has run: the names of the kernels.
    """

    def __init__(self, blocks):
        super().__init__()
        self.kernels = {}
        self._running = []
        self._names = {kernel._ops.ops.name: name for name, kernel in blocks.kernel_set.KERNELS.items()}
        self._replacement_in = blocks.replacements.replacement_in

    def begin(self, module, args):
        self._running.append(self._replacement_in(module))
        self.kernels.setdefault(self._running[-1], set())

    def end(self, module, args, output):
        self._running.pop()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in self._names:
            self.kernels[self._running[-1]].add(self._names[op.namespace])
        return op(*args, **(kwargs or {}))


@pytest.fixture
def calls(blocks):
    calls = KernelCalls(blocks)
    hooks = [register_module_forward_pre_hook(calls.begin), register_module_forward_hook(calls.end)]
    yield calls
    for hook in hooks:
        hook.remove()


def test_every_replacement_calls_the_kernels_that_it_declares(blocks, calls):
    for build in DIFFUSERS.values():
        case = built(build)
        blocks.accelerate(case.model)
        with calls:
            case.run()
    for name in CONFIGS:
        model = model_of(name)
        blocks.accelerate(model)
        with calls:
            model(TOKENS.to(model.device), attention_mask=PADDED.to(model.device), use_cache=False)
    for module in [*map(norm_named, NORMS), SwiGLU(WIDTH, WIDTH)]:
        blocks.accelerate(module)
        with calls:
            module(torch.randn(2, 5, WIDTH))
    for replacement, kernels in calls.kernels.items():
        assert kernels <= set(replacement.kernels if replacement is not None else ()), replacement
