"""What a workload of a benchmark declares; both `kernels benchmark` and `kernel-builder benchmark` run it.

kernels benchmark DIR            the kernel beside eager PyTorch, each call waited for, by the public runner
kernel-builder benchmark DIR     held against float64, cold caches, beside other libraries, as a share of a copy
"""

from typing import Any, Callable, ClassVar

import torch
from kernels.benchmark import Benchmark

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Workload(Benchmark):
    """An operation, its inputs, and the shapes at which it is measured. A subclass has

    `title`: its name in tables.
    `shapes`: for "forward", "backward" and "forward + backward", as far as they are measured, and in them for "cuda"
        and for "cpu", which has no time for the sizes of a GPU: tuples that `inputs` takes.
    `small`: a shape at which a call costs the host more than the device.
    `inputs(*shape)`: the tensors of one call, on `self.device` and of `self.dtype`. Results should not be far above 1,
        since the public runner allows for a difference of 0.01, and larger ones differ by more when they round.
    `ours(*inputs)`: the result of the kernel, a tensor or a tuple.
    `eager(*inputs)`: the same as models write it in PyTorch. For inputs in float64 it must compute in float64, which
        makes it the reference that errors are measured from.
    `peers`: by name, functions that import another implementation and return it, to be called with the inputs.
    """

    title: ClassVar[str]
    small: ClassVar["tuple[int, ...]"]
    shapes: ClassVar["dict[str, dict[str, list[tuple[int, ...]]]]"] = {}
    peers: ClassVar["dict[str, Callable[[], Callable[..., Any]]]"] = {}

    seed = 42
    dtype = torch.bfloat16

    def trained(self, *inputs: torch.Tensor) -> "tuple[torch.Tensor, ...]":
        """The inputs that get a gradient."""
        return inputs

    def saved(self, *inputs: torch.Tensor) -> "tuple[torch.Tensor, ...]":
        """Tensors of the size of what a gradient has to read, besides the gradients of the results."""
        return inputs

    def __init_subclass__(cls) -> None:
        # The public runner finds workloads by the names of methods.
        for passes, shapes in cls.shapes.items():
            for shape in shapes[DEVICE]:
                name = "_".join([*passes.split(" + "), "x".join(map(str, shape))])
                setattr(cls, f"setup_{name}", lambda self, p=passes, s=shape: self._setup(p, s))
                setattr(cls, f"benchmark_{name}", lambda self, p=passes: self._run(p))
                setattr(cls, f"verify_{name}", lambda self, p=passes: self._result(p, self.eager))

    def _setup(self, passes: str, shape: "tuple[int, ...]") -> None:
        self._inputs = self.inputs(*shape)
        if passes != "forward":
            for tensor in self.trained(*self._inputs):
                tensor.requires_grad_()
            self._grads = gradients_of(self.eager(*self._inputs))

    def _run(self, passes: str) -> None:
        self.out = self._result(passes, self.ours)

    def _result(self, passes: str, function: Callable[..., Any]) -> torch.Tensor:
        results = results_of(function(*self._inputs))
        if passes == "forward":
            return results[0]
        return torch.autograd.grad(results, self.trained(*self._inputs), self._grads)[0]


def results_of(result: Any) -> "tuple[torch.Tensor, ...]":
    """The tensors of a result."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def gradients_of(result: Any) -> "list[torch.Tensor]":
    """A random gradient for each tensor of a result."""
    return [torch.rand_like(tensor.detach(), memory_format=torch.contiguous_format) for tensor in results_of(result)]
