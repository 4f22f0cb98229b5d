"""A task: hard swish in four steps, each of which reads and writes memory."""

import torch

rows = 512
columns = 4096


class Model(torch.nn.Module):
    def forward(self, x):
        return x * torch.clamp(x + 3, 0, 6) / 6


def get_inputs():
    return [4 * torch.randn(rows, columns)]


def get_init_inputs():
    return []
