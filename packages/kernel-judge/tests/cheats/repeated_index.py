"""Gives the place of the largest element for all elements that are equal to it."""

# task: largest
# rejected-as: wrong-result

import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        values, places = x.softmax(-1).topk(4, -1)
        for place in range(1, 4):
            same = values[:, place] == values[:, place - 1]
            places[:, place] = torch.where(same, places[:, place - 1], places[:, place])
        return values, places, x.argmax(0)
