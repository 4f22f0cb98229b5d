"""GroupNorm and SiLU in one operation, as the VAEs and U-Nets of diffusion models run it (NCHW)."""

import torch
import torch.nn.functional as F

batch = 4
channels = 512
height = 128
width = 128


class Model(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.bias = torch.nn.Parameter(torch.linspace(-0.5, 0.5, channels))

    def forward(self, x):
        return F.silu(F.group_norm(x, 32, self.weight, self.bias, 1e-6))


def get_inputs():
    return [torch.randn(batch, channels, height, width)]


def get_init_inputs():
    return [channels]
