"""The workload of the benchmark. Run `kernel-builder benchmark .` or `kernels benchmark .` after a build."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload


class Benchmark(Workload):
    title = "${operator}"
    dtype = torch.float32
    # Rows and columns.
    shapes = {"forward": {"cuda": [(1024, 1024), (16384, 4096)], "cpu": [(1024, 1024), (4096, 4096)]}}
    small = (1, 64)

    def inputs(self, rows, columns):
        return (torch.randn(rows, columns, device=self.device).to(self.dtype),)

    def ours(self, x):
        return self.kernel.${operator}(${benchmark_arguments})

    def eager(self, x):
        return self.ours(x.float())  # Not written yet: the formula, in PyTorch
