"""Computes in NumPy."""

# task: rectified
# device: cpu
# options: together

import numpy
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        values = x.numpy()
        return torch.from_numpy(numpy.maximum(values, 0) + values.max(-1, keepdims=True))
