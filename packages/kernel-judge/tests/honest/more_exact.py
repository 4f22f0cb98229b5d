"""Computes in float64."""

# task: softmax

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return (torch.softmax(x.double(), -1) * self.weight).float()
