"""The model that takes the place of the task's."""

from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(__file__).parent)


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        return kernel.nearest(x, y)
