"""A task: RMSNorm over each head of q and k, each with a weight, and their rotary embedding by halves."""

import torch

tokens = 4096
q_heads = 32
k_heads = 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_weight = torch.nn.Parameter(torch.rand(128) + 0.5)
        self.k_weight = torch.nn.Parameter(torch.rand(128) + 0.5)

    def forward(self, q, k, cos, sin):
        return _turned(q, self.q_weight, cos, sin), _turned(k, self.k_weight, cos, sin)


def _turned(x, weight, cos, sin):
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def get_inputs():
    angle = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, 128, 2) / 128))
    angle = torch.cat([angle, angle], dim=-1)[None, :, None, :]
    return [torch.randn(1, tokens, q_heads, 128), torch.randn(1, tokens, k_heads, 128), angle.cos(), angle.sin()]


def get_init_inputs():
    return []
