"""Sums in another order than eager."""

# task: softmax
# options: rounds=1

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        exponentials = (x - x.amax(-1, keepdim=True)).exp_()
        total = torch.zeros_like(x[:, :1])
        for part in exponentials.split(50, -1):
            total = total + part.sum(-1, keepdim=True)
        return exponentials.mul_(self.weight).div_(total)
