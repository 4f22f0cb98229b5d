"""Never returns."""

# task: softmax
# rejected-as: timeout
# options: call_seconds=1.0

import time

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        while True:
            time.sleep(1)
