"""Computes on another stream, and makes the caller's wait for it."""

# task: softmax
# options: rounds=3

import torch

stream = torch.cuda.Stream()


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        here = torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = torch.softmax(x, -1) * self.weight
        here.wait_stream(stream)
        result.record_stream(here)
        return result
