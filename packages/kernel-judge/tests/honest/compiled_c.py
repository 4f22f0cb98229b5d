"""A C kernel that g++ compiles at import, called on raw pointers."""

# device: cpu
# task: softmax

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
#include <cmath>
extern "C" void softmax(const float* x, const float* weight, float* out, long rows, long columns) {
  for (long r = 0; r < rows; ++r, x += columns, out += columns) {
    float largest = x[0], sum = 0;
    for (long c = 1; c < columns; ++c) largest = std::fmax(largest, x[c]);
    for (long c = 0; c < columns; ++c) sum += out[c] = std::exp(x[c] - largest);
    for (long c = 0; c < columns; ++c) out[c] *= weight[c] / sum;
  }
}
"""
directory = Path(tempfile.mkdtemp())
(directory / "softmax.cpp").write_text(SOURCE)
command = ["g++", "-O2", "-shared", "-fPIC", "-o", directory / "softmax.so", directory / "softmax.cpp"]
subprocess.run(command, check=True)
softmax = ctypes.CDLL(str(directory / "softmax.so")).softmax


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, self.weight, out)]
        softmax(*pointers, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]))
        return out
