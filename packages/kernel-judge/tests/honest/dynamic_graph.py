"""Is traced for all shapes by torch.compile."""

# task: rectified
# options: together

import torch


@torch.compile(dynamic=True, backend="aot_eager")
def rectified(x):
    return torch.relu(x) + x.amax(-1, keepdim=True)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return rectified(x)
