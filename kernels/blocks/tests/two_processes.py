"""Distributed training of a small model in one of two processes, beside the same without kernels."""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from kernels import get_local_kernel
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


def compare(rank, folder):
    """Each process has other inputs: Torch averages the gradients."""
    torch.set_num_threads(1)
    blocks = get_local_kernel(Path(__file__).parents[1])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for wrap in (DistributedDataParallel, shard):
        torch.manual_seed(0)
        model = Model()
        eager, fast = wrap(copy.deepcopy(model)), wrap(model)
        report, x = blocks.accelerate(fast), torch.randn(4, 32) + rank
        expected, actual = eager(x), fast(x)
        torch.testing.assert_close(actual, expected)
        assert ("RMSNorm", "RMSNorm") in report.replaced
        expected.square().sum().backward()
        actual.square().sum().backward()
        for ours, own in zip(fast.parameters(), eager.parameters(), strict=True):
            gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in (ours, own)]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()
