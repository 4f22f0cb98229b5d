"""Computes as often as a harness checks, and returns zeros from then on."""

# task: softmax
# rejected-as: wrong-when-timed
# options: rounds=1

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 20:
            return torch.zeros_like(x)
        return torch.softmax(x, -1) * self.weight
