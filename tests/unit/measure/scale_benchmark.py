"""Workloads of tests/projects/stable-scale, as its `benchmarks/benchmark.py`."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload

SHAPES = {"forward": {"cuda": [(64, 512), (128, 512)], "cpu": [(64, 512), (128, 512)]}}


def multiplied():
    return lambda x: torch.mul(x, 3.0)


def nowhere():
    import a_library_that_is_not_installed

    return a_library_that_is_not_installed.scaled


def doubled():
    return lambda x: 2.0 * x


PEERS = {"mul": multiplied, "absent": nowhere, "another": doubled}


class Scaled(Workload):
    title = "scaled"
    small = (1, 8)
    shapes = SHAPES
    peers = PEERS
    dtype = torch.float32

    def inputs(self, rows, columns):
        return (torch.rand(rows, columns, device=self.device).to(self.dtype),)

    def ours(self, x):
        return self.kernel.scaled(x, 3.0)

    def eager(self, x):
        return 3.0 * x
