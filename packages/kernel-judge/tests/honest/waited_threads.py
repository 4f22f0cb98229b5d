"""Computes in threads, and waits for them."""

# task: softmax

from concurrent.futures import ThreadPoolExecutor

import torch

pool = ThreadPoolExecutor(2)


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        result = torch.empty_like(x)
        half = x.shape[0] // 2

        def work(rows):
            with torch.no_grad():
                result[rows] = torch.softmax(x[rows], -1) * self.weight

        list(pool.map(work, (slice(0, half), slice(half, None))))
        return result
