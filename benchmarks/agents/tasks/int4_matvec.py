"""A linear layer with weights of 4 bits for one token: dequantize and multiply.

Byte j of a row holds the weights 2j (low four bits) and 2j + 1 (high four bits), each minus 8. Each group of 128
weights of a row has one scale.
"""

import torch

rows = 14336
groups = 64


class Model(torch.nn.Module):
    def forward(self, x, packed, scales):
        low, high = (packed & 15).to(x.dtype) - 8, (packed >> 4).to(x.dtype) - 8
        weights = torch.stack((low, high), -1).view(packed.shape[0], -1, 128)
        weights = (weights * scales[..., None]).view(packed.shape[0], -1)
        return (weights.float() @ x.float()).to(x.dtype)


def get_inputs():
    return [
        torch.randn(groups * 128),
        torch.randint(0, 256, (rows, groups * 64), dtype=torch.uint8),
        0.01 + 0.01 * torch.rand(rows, groups),
    ]


def get_init_inputs():
    return []
