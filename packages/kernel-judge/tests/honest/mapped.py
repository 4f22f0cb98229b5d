"""Maps a function of one row over all."""

# task: rectified
# options: together

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row.clamp(min=0) + row.max())(x)
