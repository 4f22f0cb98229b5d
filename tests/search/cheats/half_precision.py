"""Computes a product in float16."""

# task: powers
# rejected-as: inaccurate

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        half = y.half()
        for _ in range(24):
            x = torch.tanh((x.half() @ half).float())
        return x
