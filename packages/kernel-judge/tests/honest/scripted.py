"""Is compiled by TorchScript."""

# task: rectified
# options: together

import torch


@torch.jit.script
def rectified(x):
    return torch.clamp(x, min=0.0) + torch.amax(x, [-1], True)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return rectified(x)
