"""A task: GEGLU of the halves of the last dimension, the second of which is the gate."""

import torch

rows = 8192
columns = 2560


class Model(torch.nn.Module):
    def forward(self, x):
        up, gate = x.chunk(2, dim=-1)
        return up * torch.nn.functional.gelu(gate)


def get_inputs():
    return [torch.randn(rows, 2 * columns)]


def get_init_inputs():
    return []
