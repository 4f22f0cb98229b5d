"""Has parameters of other names and layouts, from the same random numbers."""

# task: gated
# options: rounds=1

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        up = torch.nn.Linear(width, 2 * width)
        self.transposed = torch.nn.Parameter(up.weight.detach().t().contiguous())
        self.bias = torch.nn.Parameter(up.bias.detach())

    def forward(self, x):
        both = torch.addmm(self.bias, x.flatten(0, -2), self.transposed).view(*x.shape[:-1], -1)
        width = x.shape[-1]
        value, gate = both[..., :width], both[..., width:]
        return value * torch.nn.functional.gelu(gate), gate.max(-1).indices
