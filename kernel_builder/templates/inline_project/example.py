"""Loads the kernel from `build/` and calls it. Run `kernel-builder build` first."""

from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(__file__).resolve().parent, backend="${backend}")

${example}
