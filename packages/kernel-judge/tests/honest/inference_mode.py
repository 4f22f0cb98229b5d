"""Returns inference tensors."""

# task: rectified
# options: together

import torch


class ModelNew(torch.nn.Module):
    @torch.inference_mode()
    def forward(self, x):
        return torch.relu(x) + x.amax(-1, keepdim=True)
