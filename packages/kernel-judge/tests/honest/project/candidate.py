"""A kernel project of this builder: `tests/projects/stable-scale`, which the tests copy beside this file.

task: scaled
"""

from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(__file__).parent, backend="cuda" if torch.cuda.is_available() else "cpu")


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return kernel.scaled(x, 3.0)
