"""Returns one column, expanded."""

# task: row_mean
# rejected-as: wrong-strides

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x.mean(-1, keepdim=True).expand_as(x)
