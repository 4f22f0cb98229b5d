"""Workloads of the loss of language models: `kernel-builder benchmark DIR` or `kernels benchmark DIR`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from workload import Workload, peer

# Tokens, hidden size, vocabulary: Llama 3.2 1B, Llama 3.1 8B, Gemma 3 4B and Qwen 2.5 1.5B.
MODELS = [(8192, 2048, 128256), (4096, 4096, 128256), (8192, 2560, 262144), (4096, 1536, 151936)]
SHAPES = {"cuda": MODELS, "cpu": [(64, 256, 32000)]}
PEERS = {"liger": peer("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")}


class LinearCrossEntropy(Workload):
    title = "linear_cross_entropy"
    shapes = dict.fromkeys(("forward", "forward + backward"), SHAPES)
    small = (8, 256, 1024)
    peers = PEERS

    def inputs(self, tokens, hidden, vocabulary):
        x = torch.randn(tokens, hidden, device=self.device).to(self.dtype)
        weight = (torch.randn(vocabulary, hidden, device=self.device) * hidden**-0.5).to(self.dtype)
        return x, weight, torch.randint(vocabulary, (tokens,), device=self.device)

    def ours(self, x, weight, target):
        return self.kernel.linear_cross_entropy(x, weight, target)

    def eager(self, x, weight, target):
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)
