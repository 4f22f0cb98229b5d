"""Loads the kernel from `build/` and calls it. Run `kernel-builder build` first."""

from pathlib import Path

import torch
from kernels import get_local_kernel

backends = ${backends}
device = "cuda" if "cuda" in backends and torch.cuda.is_available() else "cpu"
if device not in backends:
    raise SystemExit(f"this kernel is for {' and '.join(backends)}, and Torch {torch.__version__} finds no such device here")
kernel = get_local_kernel(Path(__file__).resolve().parent, backend=device)

x = torch.randn(2, 4, device=device, requires_grad=True)
y = kernel.${operator}(x)
y.sum().backward()
print(x, y, x.grad, sep="\n")
