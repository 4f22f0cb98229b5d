"""The reference of a task at one choice of sizes and dtype: inputs, results in float64, and eager's own results."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from kernel_builder.api import size
from kernel_format.errors import ConfigError, KernelBuilderError
from kernel_judge.judge.evaluation import (
    ResultError,
    evaluate,
    randomize,
    seed_generators,
    synchronize,
    with_tensors,
    without_tensors,
)
from kernel_tasks import Sizes, Task

Tensors = list[torch.Tensor]
Results = list[tuple[tuple[int, ...], torch.dtype]]
_COUNTED = {str(operation).replace(".", "::") for operation in flop_registry}


@dataclass(frozen=True)
class Arguments:
    """The inputs of one call."""

    skeleton: Any  # the arguments, with placeholders for tensors
    tensors: Tensors
    grads: Tensors | None  # of the results; None without a backward pass
    seed: int  # of the random generators before the call


class Reference:
    """The model of a task, and the properties of its results.

    Args:
        dtype: The dtype of floating-point inputs and parameters; None for the file's own.
        lengths: Lengths of dimensions of the inputs -> the shorter ones to which they are cut.
        random_parameters: Whether parameters of ones or zeros get other values.

    Attributes:
        randomized: The result of `randomize`; None without `random_parameters`.
        parameters: Names of the parameters that get a gradient.
        results: The shapes and dtypes of the results.
        accepted: Those of the candidate's results, whose dtypes differ where the task's rule decides on dtypes.
        decides_dtypes: Whether it does.
        has_rule: Whether the task has a rule of its own for right results.
        has_exact: Whether the model can be computed in float64.
        may_change: Whether a candidate may change inputs, as the reference does with a buffer for its result.
        seconds, drawing_seconds: The time of one eager call here, and of drawing its inputs, the least so far.
        operations: Operations of a call in matrix products, convolutions and attention, as
            `torch.utils.flop_counter` counts them; 0 before `count_operations`, and if they cannot be counted.
    """

    operations, drawing_seconds = 0, math.inf

    def __init__(
        self,
        task: Task,
        sizes: Sizes,
        dtype: str | None,
        device: str,
        seed: int,
        *,
        lengths: Mapping[int, int] | None = None,
        random_parameters: bool = False,
    ) -> None:
        self.sizes, self.dtype, self.device, self.seed = dict(sizes), dtype, device, seed
        self.lengths = dict(lengths or {})
        self._backward = task.settings.backward
        self._path = str(task.path)
        self._problem = task.problem(sizes)
        self.has_rule, self.decides_dtypes = self._problem.fault is not None, self._problem.decides_dtypes
        try:
            seed_generators(device, seed)
            self.init = self._problem.get_init_inputs()
            seed_generators(device, seed)
            self._model = self._problem.Model(*self.init).to(device)
            if dtype:
                self._model = self._model.to(getattr(torch, dtype))
            self.randomized = randomize(self._model, seed) if random_parameters else None
            self.state = {name: value.detach().cpu().clone() for name, value in self._model.state_dict().items()}
            named = sorted(dict(self._model.named_parameters())) if self._backward else []
            self.parameters: Sequence[str] = named
            self._exact: Any = copy.deepcopy(self._model).double()
            self._probe()
        except (KernelBuilderError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            raise ConfigError(
                f"the reference cannot be run: {type(error).__name__}: {reason[0]}",
                where=self._path,
                hint=f"the sizes were {self.sizes}",
            ) from error

    def arguments(self, seed: int) -> Arguments:
        """Return the inputs that a seed gives."""
        started = time.perf_counter()
        seed_generators(self.device, seed)
        if self.device == "cpu":
            given = self._problem.get_inputs()
        else:
            with torch.device(self.device):
                given = self._problem.get_inputs()
        tensors: Tensors = []
        skeleton = without_tensors(given, tensors)
        if packed := [tensor.dtype for tensor in tensors if "float4" in str(tensor.dtype)]:
            raise ConfigError(
                f"an input is {packed[0]}, which cannot be compared; expected at least 8 bits for each element",
                where=self._path,
                hint="use the task's own evaluator",
            )
        tensors = [self._cast(self._cut(tensor.detach().to(self.device))) for tensor in tensors]
        grads = None
        if self._backward:
            grads = [torch.randn(shape, device=self.device).to(dtype) for shape, dtype in self.results[: self._forward]]
        synchronize(self.device)
        self.drawing_seconds = min(self.drawing_seconds, time.perf_counter() - started)
        return Arguments(skeleton, tensors, grads, seed)

    def eager(self, given: Arguments) -> Tensors:
        """Return the results of eager PyTorch."""
        return self._evaluate(self._model, given, lambda tensor: tensor.clone())

    def exact(self, given: Arguments) -> Tensors | None:
        """Return the results in float64, or None if the model cannot be computed so."""
        if not self.has_exact:
            return None
        return self._evaluate(
            self._exact, given, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.clone()
        )

    def unsettled(self, given: Arguments, number: int) -> torch.Tensor:
        """Return which elements of one of eager's results are in a row that depends on the last places of the inputs.

        These are changed at random, and each change is made with both signs: the first of equal elements is then
        another one. Rows are those of any dimension.
        """
        plain = self.eager(given)[number]
        found = torch.zeros_like(plain, dtype=torch.bool)
        for seed, sign in product((given.seed, given.seed ^ 1), (1, -1)):
            change = partial(_moved, sign, torch.Generator(self.device).manual_seed(seed))
            found |= self._evaluate(self._model, given, change)[number] != plain
        rows = [found.any(dim, keepdim=True) for dim in range(found.dim()) if found.dim() > 1]
        return sum(rows, found) > 0

    def fault(self, given: Arguments, results: Tensors, eager: Tensors) -> str | None:
        """Return why results are wrong by the task's own rule, or None."""
        assert self._problem.fault
        try:
            arguments = with_tensors(given.skeleton, [tensor.clone() for tensor in given.tensors])
            return self._problem.fault(arguments, results, eager)
        except Exception as error:
            return f"the task's rule raises {type(error).__name__}: {error}"

    def accepts(self, given: Arguments, results: Tensors, eager: Tensors) -> bool:
        """Return whether the task's own rule accepts results, or does not apply: it rejects eager's, too."""
        return self.has_rule and (
            self.fault(given, results, eager) is None or self.fault(given, eager, eager) is not None
        )

    def _evaluate(self, model: Any, given: Arguments, change: Any) -> Tensors:
        seed_generators(self.device, given.seed)
        arguments = with_tensors(given.skeleton, [change(tensor) for tensor in given.tensors])
        grads = None if given.grads is None else [change(grad) for grad in given.grads]
        return evaluate(model, arguments, grads, self.parameters)

    def _probe(self) -> None:
        backward, self._backward = self._backward, False
        given = self.arguments(self.seed)
        tensors = [tensor.clone() for tensor in given.tensors]
        generator_state = torch.get_rng_state if self.device == "cpu" else torch.cuda.get_rng_state
        seed_generators(self.device, self.seed)
        unused = generator_state()
        try:
            outputs = evaluate(self._model, with_tensors(given.skeleton, tensors), None, ())
        except ResultError as error:
            raise ConfigError(f"the reference cannot be judged: {error}", where=self._path) from error
        draws = not torch.equal(unused, generator_state())
        now, before = ([t.flatten().contiguous().view(torch.uint8) for t in all_] for all_ in (tensors, given.tensors))
        written = [tensor for tensor, *bits in zip(tensors, now, before, strict=True) if not torch.equal(*bits)]
        self.may_change = self._problem.may_overwrite or bool(written)
        returned = {(output.data_ptr(), output.nbytes) for output in outputs}
        if not self._problem.may_overwrite and any((t.data_ptr(), t.nbytes) not in returned for t in written):
            raise ConfigError(
                "the reference writes to an input that it does not return",
                where=self._path,
                hint="return that input: the judge compares results only",
            )
        self._backward, self._forward = backward, len(outputs)
        self.results = [(tuple(output.shape), output.dtype) for output in outputs]
        given = self.arguments(self.seed)
        expected = self.eager(given)
        self.results = [(tuple(result.shape), result.dtype) for result in expected]
        self.accepted: Results = self.results
        self.seconds = min(self._seconds(given) for _ in range(3))
        self.has_exact = True
        try:
            exact = self.exact(given)
            assert exact is not None
            least = [0.0 if draws else 1.0] * self._forward + [1.0] * len(expected)
            self.has_exact = all(map(_close, expected, exact, least))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # code that casts, or an operation without float64
            self.has_exact = False

    def _seconds(self, given: Arguments) -> float:
        synchronize(self.device)
        started = time.perf_counter()
        self.eager(given)
        synchronize(self.device)
        return time.perf_counter() - started

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(getattr(torch, self.dtype)) if self.dtype and tensor.is_floating_point() else tensor

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.lengths:
            return tensor
        for place, length in enumerate(tensor.shape):
            tensor = tensor.narrow(place, 0, self.lengths.get(length, length))
        return tensor.clone(memory_format=torch.contiguous_format)

    def model_arguments(self, peer: str | None = None) -> tuple[Any, ...]:
        """Return the arguments of the worker's command "model" after the number, for the candidate or a peer."""
        overwrites = peer == "max-autotune" if peer else self._problem.may_overwrite
        draws = self.randomized is not None
        return self.init, self.state, self.dtype, self.seed, peer or "eager", overwrites, self.parameters, draws

    def moved(self, given: Arguments) -> tuple[int, int]:
        """Return the bytes that a call must read, of inputs and parameters, and write, of results.

        Tensors that share memory, such as tied parameters, count once.
        """
        read = size([*given.tensors, *(given.grads or ()), *self._model.state_dict().values()])
        return read, _bytes(self.accepted)

    def accepted_share(self) -> float:
        """Return the bytes of the candidate's results, divided by those of the reference's."""
        return _bytes(self.accepted) / max(_bytes(self.results), 1)

    def dtypes(self, given: Arguments) -> set[torch.dtype]:
        """Return the dtypes of inputs and parameters."""
        return {tensor.dtype for tensor in (*given.tensors, *self.state.values())}

    def count_operations(self) -> None:
        """Set `operations`."""
        given = self.arguments(self.seed)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # each profile prints two lines otherwise
        try:
            # The first use of the counter imports Dynamo, which takes 3 s of CPU time; few tasks have such operations.
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                self.eager(given)
            if not _COUNTED & {event.name for event in profile.function_events or ()}:
                return
            with FlopCounterMode(display=False) as counter:
                self.eager(given)
            self.operations = int(counter.get_total_flops())
        except Exception:  # code that cannot be dispatched, such as a compiled function
            self.operations = 0


def _bytes(results: Results) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in results)


def _moved(sign: int, random: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are off by some units in their last place, and in that of their mean."""
    if not tensor.is_floating_point():
        return tensor.clone()
    wide = tensor.double()
    least = wide[wide.isfinite()].abs().mean().nan_to_num(0.0)
    noise = torch.randn(tensor.shape, dtype=torch.float64, device=tensor.device, generator=random)
    return (wide + sign * 4 * torch.finfo(tensor.dtype).eps * (wide.abs() + least) * noise).to(tensor.dtype)


def _close(eager: torch.Tensor, exact: torch.Tensor, least: float) -> bool:
    """Return whether float64 computes the same thing as eager: random masks may depend on the dtype.

    The whole tensors are compared, since sums of many 16-bit numbers may be far off at some elements. Elements count
    as at least `least`, for results that are nothing but rounding errors.
    """
    if eager.shape != exact.shape:
        return False
    wide, exact = eager.double(), exact.double()
    difference = torch.where((wide == exact) | (wide.isnan() & exact.isnan()), 0.0, wide - exact)
    size = exact[exact.isfinite()].norm() + least * math.sqrt(exact.numel())
    return bool(difference.norm() <= 0.1 * size)
