"""The workloads of the benchmark. Run `kernel-builder benchmark .` or `kernels benchmark .` after a build."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload

# Rows and columns.
GPU = [(1024, 1024), (4096, 4096), (16384, 4096)]
CPU = [(1024, 1024), (4096, 4096)]
SHAPES = {"cuda": GPU, "cpu": CPU}


class ${layer}(Workload):
    title = "${operator}"
    shapes = {name: SHAPES for name in ${passes}}
    small = (1, 64)

    def inputs(self, rows, columns):
        return (torch.randn(rows, columns, device=self.device).to(self.dtype),)

    def ours(self, x):
        return self.kernel.${operator}(${benchmark_arguments})

    def eager(self, x):
        return ${formula}
