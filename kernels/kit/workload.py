"""Base class of benchmark workloads, which `kernels benchmark` and `kernel-builder benchmark` both run.

kernels benchmark DIR            compares the kernel with eager PyTorch and waits for each call (the public runner)
kernel-builder benchmark DIR     compares with float64, other libraries and copy speed, with cold caches
"""

from importlib import import_module
from operator import attrgetter
from typing import Any, Callable, ClassVar

import torch
from kernels.benchmark import Benchmark

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Workload(Benchmark):
    """An operation, its inputs, and the shapes to measure.

    A subclass defines:
        title: The name of the operation in tables.
        shapes: Pass ("forward", "backward" or "forward + backward") -> device ("cuda" or "cpu") -> tuples of arguments
            of `inputs`. Other passes are not measured.
        small: A shape at which a call takes more time on the host than on the device.
        inputs(*shape): Returns the tensors of one call, on `self.device` and of `self.dtype`. Results should be at most
            about 1: the public runner allows an absolute error of 0.01.
        ours(*inputs): Returns the result of the kernel, a tensor or a tuple of tensors.
        eager(*inputs): Returns the same result computed by PyTorch as models write it. For float64 inputs it must
            compute in float64; its result is then the reference for errors.
        peers: Name -> a function that imports another implementation and returns it. Peers take the same inputs.
        naive(*inputs): Optional: the same by `self.naive_kernel`, the package of the project in `naive/`, forward only.
    """

    title: ClassVar[str]
    small: ClassVar["tuple[int, ...]"]
    shapes: ClassVar["dict[str, dict[str, list[tuple[int, ...]]]]"] = {}
    peers: ClassVar["dict[str, Callable[[], Callable[..., Any]]]"] = {}

    seed = 42
    dtype = torch.bfloat16

    def trained(self, *inputs: torch.Tensor) -> "tuple[torch.Tensor, ...]":
        """Return the inputs that need a gradient."""
        return tuple(tensor for tensor in inputs if tensor.is_floating_point())

    def saved(self, *inputs: torch.Tensor) -> "tuple[torch.Tensor, ...]":
        """Return tensors as large as those that the backward pass reads, without the gradients of the results."""
        return inputs

    def __init_subclass__(cls) -> None:
        # The public runner finds workloads by the names of their methods.
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


def peer(module: str, function: str, *options: Any, **named_options: Any) -> Callable[[], Callable[..., Any]]:
    """Return an entry of `peers`: a function of a module, which is called with the tensors and then the options."""

    def load() -> Callable[..., Any]:
        loaded = attrgetter(function)(import_module(module))
        return lambda *tensors: loaded(*tensors, *options, **named_options)

    return load


def results_of(result: Any) -> "tuple[torch.Tensor, ...]":
    """Return the result as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def gradients_of(result: Any) -> "list[torch.Tensor]":
    """Return a random gradient for each tensor of a result."""
    return [torch.rand_like(tensor.detach(), memory_format=torch.contiguous_format) for tensor in results_of(result)]
