"""Differs from call to call by more than rounding."""

# task: softmax
# rejected-as: inaccurate

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        result = torch.softmax(x, -1) * self.weight
        return result * (1 + 1e-4 * torch.randn_like(result))
