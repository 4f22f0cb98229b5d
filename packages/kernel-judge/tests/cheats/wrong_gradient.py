"""Scales the gradient of its input."""

# task: trained
# rejected-as: wrong-result

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(columns))

    def forward(self, x):
        result = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)
        return 1.5 * result - 0.5 * result.detach()
