"""Leaves the last elements of the result as they were allocated."""

# task: softmax
# rejected-as: wrong-result

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        result = torch.empty_like(x)
        result.view(-1)[:-3] = (torch.softmax(x, -1) * self.weight).view(-1)[:-3]
        return result
