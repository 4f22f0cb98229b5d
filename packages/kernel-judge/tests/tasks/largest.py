import torch


class Model(torch.nn.Module):
    def forward(self, x):
        values, places = x.softmax(-1).topk(4, -1)
        return values, places, x.argmax(0)


def get_inputs():
    return [torch.randn(48, 100).round(decimals=1)]


def get_init_inputs():
    return []
