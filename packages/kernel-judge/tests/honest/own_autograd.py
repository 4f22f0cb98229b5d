"""An autograd function with a backward pass of its own, in the precision of eager."""

# task: trained
# options: rounds=1

import torch


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed, grad = x.float() * scale, grad.float()
        weighted = grad * weight.float()
        dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(columns))

    def forward(self, x):
        return Norm.apply(x, self.weight)
