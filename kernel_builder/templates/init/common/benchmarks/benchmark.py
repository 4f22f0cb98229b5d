"""Times the kernel against Torch: `kernels benchmark .` in the project, after a build."""

import torch
from kernels.benchmark import Benchmark


class ReLU(Benchmark):
    seed = 0

    def setup(self):
        self.x = torch.randn(4096, 4096, device=self.device)
        self.out = torch.empty_like(self.x)

    def benchmark_relu(self):
        self.out = self.kernel.relu(self.x)

    def verify_relu(self) -> torch.Tensor:
        return torch.relu(self.x)
