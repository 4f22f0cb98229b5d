import torch

batch = 3
tokens = 24
width = 64


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)

    def forward(self, x):
        value, gate = self.up(x).chunk(2, -1)
        return value * torch.nn.functional.gelu(gate), gate.argmax(-1)


def get_inputs():
    return [torch.randn(batch, tokens, width)]


def get_init_inputs():
    return [width]
