"""The backward pass of RMSNorm: the gradients of its input and its weight, for the training of language models."""

import torch

rows = 8192
columns = 4096


class Model(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x, gradient):
        x, gradient, weight = x.float(), gradient.float(), self.weight.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = x * scale
        scaled = gradient * weight
        of_input = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        of_weight = (gradient * normed).sum(0)
        return of_input.to(self.weight.dtype), of_weight.to(self.weight.dtype)


def get_inputs():
    return [torch.randn(rows, columns), torch.randn(rows, columns)]


def get_init_inputs():
    return [columns]
