import torch

elements = 5000


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3.0


def get_inputs():
    return [torch.randn(elements)]


def get_init_inputs():
    return []
