"""Computes the last of its products in float16: wrong by less than the tolerance, and by more than eager is."""

# task: powers
# rejected-as: inaccurate

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        for _ in range(23):
            x = torch.tanh(x @ y)
        return torch.tanh((x.half() @ y.half()).float())
