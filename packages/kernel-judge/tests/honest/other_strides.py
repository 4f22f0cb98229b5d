"""Returns a dense result whose elements are stored by columns."""

# task: row_mean

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        result = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
        result.copy_(x.sum(-1).div(x.shape[-1]))
        return result.t()
