"""Is wrong in one call of five."""

# task: softmax
# rejected-as: wrong-result
# options: inputs=100

import random

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        result = torch.softmax(x, -1) * self.weight
        if random.random() < 0.2:
            result[-1] += 1
        return result
