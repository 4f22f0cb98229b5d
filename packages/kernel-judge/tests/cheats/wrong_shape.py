"""Returns the first row."""

# task: softmax
# rejected-as: wrong-shape

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return torch.softmax(x[:1], -1) * self.weight
