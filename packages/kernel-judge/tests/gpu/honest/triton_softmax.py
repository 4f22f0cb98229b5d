"""A Triton kernel, one row a program."""

# task: softmax
# options: rounds=3

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_row(x, weight, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, inside, -float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    values = values / tl.sum(values, 0) * tl.load(weight + column, inside, 0.0)
    tl.store(out + row * columns + column, values, inside)


class ModelNew(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        softmax_row[(x.shape[0],)](x, self.weight, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
        return out
