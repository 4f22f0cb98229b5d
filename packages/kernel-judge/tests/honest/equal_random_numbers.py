"""Draws the random numbers that the reference draws."""

# task: dropped
# device: cpu

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        kept = torch.empty_like(x).bernoulli_(0.75)
        return x * kept.div_(0.75)
