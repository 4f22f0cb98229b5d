"""Distributed training of a small model in one of some processes, beside the same without kernels."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from kernels import get_local_kernel
from model_cases import DEVICE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(self.norm(x))


def shard(model):
    fully_shard(model.linear)
    return fully_shard(model)


def train(model, x):
    """Return the output and the gradients, of all processes."""
    model.zero_grad()
    (output := model(x)).square().sum().backward()
    return output, *(getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters())


def compare(rank, processes, folder):
    """Each process has other inputs: Torch averages the gradients."""
    torch.set_num_threads(1)
    blocks = get_local_kernel(Path(__file__).parents[1])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend, store = "nccl" if DEVICE == "cuda" else "gloo", dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    for wrap, is_first in ((wrap, is_first) for wrap in (DistributedDataParallel, shard) for is_first in (True, False)):
        torch.manual_seed(0)
        model, x = Model().to(DEVICE), (torch.randn(4, 32) + rank).to(DEVICE)
        eager = wrap(copy.deepcopy(model))
        if is_first:
            blocks.accelerate(model)
            model(x)
        model = wrap(model)
        classes, expected = [*map(type, model.modules())], train(eager, x)
        report = blocks.accelerate(model)
        for ours, own in zip(train(model, x), expected, strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)
        # Torch does not trace the hooks of wrappers.
        assert ("RMSNorm", "RMSNorm") in report.replaced and {kind for kind, _ in report.left} == {"graph break"}
        for part in model.modules():  # also what was accelerated in a wrapper
            blocks.restore(part)
        assert [*map(type, model.modules())] == classes and torch.equal(model(x), expected[0])
    dist.destroy_process_group()
