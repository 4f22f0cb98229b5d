"""Allocates a result and hopes for a right one in it."""

# task: softmax
# rejected-as: wrong-result

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return torch.empty_like(x)
