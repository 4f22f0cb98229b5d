"""Is an autograd function."""

# task: layer_norm
# options: together

import torch


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * weight + bias

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.norm = torch.nn.LayerNorm(columns)

    def forward(self, x):
        return Norm.apply(x, self.norm.weight, self.norm.bias)
