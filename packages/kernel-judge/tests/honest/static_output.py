"""Computes into memory of its own, and returns a copy."""

# task: rectified
# options: together

import torch


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.results = {}

    def forward(self, x):
        result = self.results.setdefault(x.shape, torch.empty_like(x))
        torch.clamp(x, min=0, out=result)
        return result.add_(x.amax(-1, keepdim=True)).clone()
