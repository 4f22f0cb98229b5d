"""Has parameters of other names, orders and shapes, which are ones and zeros as well."""

# task: layer_norm
# options: together

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1, columns))
        self.gain = torch.nn.Parameter(torch.ones(columns, 1))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return centred * scale * self.gain.view(-1) + self.shift
