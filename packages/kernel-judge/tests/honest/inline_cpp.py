"""Inline C++ with PyTorch's own headers."""

# device: cpu
# task: scaled
# options: slow

import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
torch::Tensor scaled(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = 3.f * from[i];
  return out;
}
"""
module = load_inline("scaled", SOURCE, functions=["scaled"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.scaled(x.contiguous())
