"""Computes in bfloat16."""

# task: softmax
# rejected-as: inaccurate

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return (torch.softmax(x.bfloat16(), -1) * self.weight).float()
