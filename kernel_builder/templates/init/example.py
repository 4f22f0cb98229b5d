"""Loads the kernel from `build/` and calls it. Run `kernel-builder build` first."""

from pathlib import Path

import torch
from kernels import get_local_kernel

device = "cuda" if "cuda" in ${backends} and torch.cuda.is_available() else "cpu"
kernel = get_local_kernel(Path(__file__).resolve().parent, backend=device)

x = torch.randn(2, 4, device=device, requires_grad=True)
y = kernel.${operator}(x)
y.sum().backward()
print(x, y, x.grad, sep="\n")
