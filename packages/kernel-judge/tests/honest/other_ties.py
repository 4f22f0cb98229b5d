"""Takes the last of equal elements."""

# task: largest

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        flipped = x.softmax(-1).flip(-1)
        values, places = flipped.sort(dim=-1, descending=True, stable=True)
        last = x.shape[0] - 1 - (x.flip(0) == x.amax(0)).to(torch.int).argmax(0)
        return values[:, :4], x.shape[-1] - 1 - places[:, :4], last
