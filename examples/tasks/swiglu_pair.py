"""A task: SwiGLU of two tensors."""

import torch

rows = 4096
columns = 8192


class Model(torch.nn.Module):
    def forward(self, gate, up):
        return torch.nn.functional.silu(gate) * up


def get_inputs():
    return [torch.randn(rows, columns), torch.randn(rows, columns)]


def get_init_inputs():
    return []
