"""Copies its input into a graph's memory, and replays the graph."""

# task: scaled
# options: rounds=3

import torch


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.graphs = {}

    def forward(self, x):
        if x.shape not in self.graphs:
            given = x.clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = 3.0 * given
            self.graphs[x.shape] = graph, given, result
        graph, given, result = self.graphs[x.shape]
        given.copy_(x)
        graph.replay()
        return result.clone()
