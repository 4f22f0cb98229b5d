"""Each replacement calls the kernels that it declares, and no others."""

import functools

import pytest
import small_image_models
import small_video_models
import torch
from diffusers.models.activations import SwiGLU
from model_cases import built
from test_blocks_norms import NORMS, WIDTH, norm_named
from text_models import CONFIGS, PADDED, TOKENS, model_of
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_device_of_the_kernels", "no_grad")

DIFFUSERS = {**small_image_models.CASES, **small_video_models.CASES}


class KernelCalls(TorchDispatchMode):
    """Records which kernels' ops the forwards of replacements call, without those of replaced modules inside.

    Attributes:
        kernels: By the class of a replacement whose forward has run: the names of the kernels.
    """

    def __init__(self, blocks, patch):
        super().__init__()
        self.kernels = {}
        self._running = []
        self._names = {kernel._ops.ops.name: name for name, kernel in blocks.kernel_set.KERNELS.items()}
        mixins = {replacement.mixin for replacement in blocks.replacements._by_path.values()}
        # All are looked up before the first is patched: some are inherited.
        for mixin, forward in [(mixin, mixin.forward) for mixin in mixins]:
            patch.setattr(mixin, "forward", self._recorded(mixin, forward))

    def _recorded(self, mixin, forward):
        @functools.wraps(forward)
        def recorded(*args, **kwargs):
            self.kernels.setdefault(mixin, set())
            self._running.append(mixin)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return recorded

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace in self._names:
            self.kernels[self._running[-1]].add(self._names[op.namespace])
        return op(*args, **(kwargs or {}))


def test_every_replacement_calls_the_kernels_that_it_declares(blocks, monkeypatch):
    calls = KernelCalls(blocks, monkeypatch)
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
    declared = {replacement.mixin: set(replacement.kernels) for replacement in blocks.replacements._by_path.values()}
    assert calls.kernels == declared
