"""A task: rotary embedding of the tokens of a video, whose positions are on a grid of frames, rows and columns.

Pairs are neighbours. Of the 64 pairs of a head, 22 turn with the frame, 21 with the row and 21 with the column.
"""

import torch

frames = 5
height = 30
width = 52
heads = 12


class Model(torch.nn.Module):
    def forward(self, q, k, positions):
        angles = []
        for axis, dim in enumerate((44, 42, 42)):
            frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=q.device, dtype=positions.dtype) / dim)
            angles.append(positions[:, axis, None] * frequencies)
        angle = torch.cat(angles, dim=-1)[:, None, :]
        return _turned(q, angle), _turned(k, angle)


def _turned(x, angle):
    even, odd = x[..., 0::2].to(angle.dtype), x[..., 1::2].to(angle.dtype)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def get_inputs():
    axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    positions = torch.stack([axis.flatten() for axis in axes], dim=-1).float()
    tokens = len(positions)
    return [torch.randn(1, tokens, heads, 128), torch.randn(1, tokens, heads, 128), positions]


def get_init_inputs():
    return []
