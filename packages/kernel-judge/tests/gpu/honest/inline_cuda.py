"""Inline CUDA."""

# task: scaled
# options: rounds=3

import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

__global__ void scale(const float* in, float* out, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = 3.f * in[i];
}

torch::Tensor scaled(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const int64_t count = x.numel();
  scale<<<(count + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), out.data_ptr<float>(), count);
  return out;
}
"""
module = load_inline("scaled", "torch::Tensor scaled(torch::Tensor x);", SOURCE, functions=["scaled"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.scaled(x.contiguous())
