"""Workloads of one decoding step: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload

# Inputs and outputs of the layers of Llama 3 8B: query, key and value together, the projection after attention, that
# after the MLP, and the head of the model; then one of a small model.
LAYERS = [(4096, 6144), (4096, 4096), (14336, 4096), (4096, 128256), (4096, 1024)]
MLPS = [(4096, 14336)]
ROWS = (1, 4, 8)  # one token of so many sequences
# Batch, query heads, key heads, tokens of the cache, elements per head.
CACHES = [(batch, 32, 8, tokens, 128) for batch in (1, 8) for tokens in (328, 8192)]


def autotuned(function):
    """Return a peer: the fastest of the kernels of cuBLAS and Triton that torch.compile finds for a shape."""
    return {"max-autotune": lambda: torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)}


def forward(cuda, cpu):
    return {"forward": {"cuda": cuda, "cpu": cpu}}


class Linear(Workload):
    title = "linear"
    peers = autotuned(F.linear)
    shapes = forward([(rows, *layer) for layer in LAYERS for rows in ROWS], [(rows, 4096, 4096) for rows in ROWS])
    small = (1, 256, 256)

    def inputs(self, rows, inputs, outputs):
        x = torch.randn(rows, inputs, device=self.device).to(self.dtype)
        return x, torch.randn(outputs, inputs, device=self.device).div_(4 * inputs**0.5).to(self.dtype)

    def ours(self, x, weight):
        return self.kernel.linear(x, weight, constant_weights=True)  # as of a model in inference

    def naive(self, x, weight):
        return self.naive_kernel.linear(x, weight)

    eager = staticmethod(F.linear)


def gated(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


class GatedLinear(Workload):
    title = "gated_linear"
    peers = autotuned(gated)
    shapes = forward([(rows, *mlp) for mlp in MLPS for rows in ROWS], [(rows, 2048, 4096) for rows in ROWS])
    small = (1, 256, 256)

    def inputs(self, rows, inputs, outputs):
        x, gate = Linear.inputs(self, rows, inputs, outputs)
        return x, gate, torch.randn_like(gate).div_(4 * inputs**0.5)

    def ours(self, x, gate, up):
        return self.kernel.gated_linear(x, gate, up, constant_weights=True)

    def naive(self, x, gate, up):
        return self.naive_kernel.gated_linear(x, gate, up)

    eager = staticmethod(gated)


class Attention(Workload):
    title = "attention"
    shapes = forward(CACHES, CACHES[:2])
    small = (1, 4, 2, 64, 64)

    def inputs(self, batch, query_heads, key_heads, tokens, elements):
        query = torch.randn(batch, query_heads, 1, elements, device=self.device)
        key, value = torch.randn(2, batch, key_heads, tokens, elements, device=self.device).to(self.dtype)
        return query.to(self.dtype), key, value

    def ours(self, query, key, value):
        return self.kernel.attention(query, key, value)

    def naive(self, query, key, value):
        return self.naive_kernel.attention(query, key, value)

    def eager(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
