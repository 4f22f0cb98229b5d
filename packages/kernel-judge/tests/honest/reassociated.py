"""A long chain of products, computed transposed."""

# task: powers
# options: rounds=1

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        x, y = x.t().contiguous(), y.t().contiguous()
        for _ in range(24):
            x = torch.mm(y, x).tanh_()
        return x.t()
