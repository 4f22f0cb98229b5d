"""Returns NaN in some elements."""

# task: softmax
# rejected-as: not-finite

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        result = torch.softmax(x, -1) * self.weight
        result[0, 0] = float("nan")
        return result
