"""The reference of a task at one choice of sizes and dtype: inputs, results in float64, and eager's own results."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from kernel_builder.api import size
from kernel_format.errors import ConfigError, KernelBuilderError
from kernel_judge.judge.evaluation import (
    ResultError,
    evaluate,
    randomize,
    synchronize,
    with_tensors,
    without_tensors,
)
from kernel_tasks import Sizes, Task

Tensors = list[torch.Tensor]
Results = list[tuple[tuple[int, ...], torch.dtype]]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OTHER_INTEGERS = 0.25  # the largest share of the integers of a result that float64 changes
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
        random_parameters: Whether parameters of equal values get other ones.

    Attributes:
        randomized: The result of `randomize`; None without `random_parameters`.
        parameters: Names of the parameters that get a gradient.
        results: The shapes and dtypes of the results.
        accepted: Those of the candidate's results, whose dtypes differ where the task's rule decides on dtypes.
        decides_dtypes: Whether it does.
        has_rule: Whether the task has a rule of its own for right results.
        has_exact: Whether the model can be computed in float64, and draws no random numbers.
        statistics: Names of the buffers that calls change, of batch normalizations.
        may_change: Whether a candidate may change inputs, as the reference does with a buffer for its result.
        seconds, drawing_seconds: The time of one eager call here, and of drawing its inputs, the least so far.
        operations: Operations of a call in matrix products, convolutions and attention, as
            `torch.utils.flop_counter` counts them; 0 before `count_operations`, and if they cannot be counted.
    """

    operations, seconds, drawing_seconds = 0, math.inf, math.inf

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
        self._backward, self._is_drawn = task.settings.backward, not task.workloads
        self._path = str(task.path)
        self._problem = task.problem(sizes)
        self.has_rule, self.decides_dtypes = self._problem.fault is not None, self._problem.decides_dtypes
        try:
            torch.manual_seed(seed)
            self.init = self._problem.get_init_inputs()
            torch.manual_seed(seed)
            self._model = self._problem.Model(*self.init).to(device)
            if dtype:
                self._model = self._model.to(getattr(torch, dtype))
            self.randomized = randomize(self._model, seed) if random_parameters else None
            self.state = {name: value.detach().cpu().clone() for name, value in self._model.state_dict().items()}
            self.parameters = sorted(dict(self._model.named_parameters())) if self._backward else []
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
        torch.manual_seed(seed)
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
        """Return the results in float64, within the range of their dtypes, or None if there are none."""
        if not self.has_exact:
            return None
        results = self._evaluate(self._exact, given, _widened)
        return [_within(result, dtype) for result, (_, dtype) in zip(results, self.results, strict=True)]

    def nearby(self, given: Arguments) -> Iterator[Tensors]:
        """Yield eager's and the float64 results for inputs that differ in their last places, up or down.

        These break ties: the ones of eager by chance, the others by place, and both in both orders. Inputs stay within
        their range; a reference that refuses them has no further results.
        """
        for options in product((False, True)[: 1 + self.has_exact], (1, -1), (False, True)):
            change = partial(_moved, *options, torch.Generator(self.device).manual_seed(given.seed))
            try:
                found = self._evaluate(self._exact if options[0] else self._model, given, change)
            except Exception:  # it refuses these inputs
                continue
            yield found

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
        return self.has_rule and (not self.fault(given, results, eager) or bool(self.fault(given, eager, eager)))

    def _evaluate(self, model: Any, given: Arguments, change: Any) -> Tensors:
        torch.manual_seed(given.seed)
        arguments = with_tensors(given.skeleton, [change(tensor) for tensor in given.tensors])
        grads = None if given.grads is None else [change(grad) for grad in given.grads]
        return evaluate(model, arguments, grads, self.parameters)

    def _probe(self) -> None:
        backward, self._backward = self._backward, False
        given, other = self.arguments(self.seed), self.arguments(self.seed + 1)
        tensors = [tensor.clone() for tensor in given.tensors]
        before = _bits(given.tensors)
        is_same = repr(given.skeleton) == repr(other.skeleton) and all(map(torch.equal, before, _bits(other.tensors)))
        if self._is_drawn and is_same and given.skeleton:
            self._refuse("get_inputs returns the same values twice", "draw them without a seed of their own")
        generator_state = torch.get_rng_state if self.device == "cpu" else torch.cuda.get_rng_state
        torch.manual_seed(self.seed)
        unused = generator_state()
        try:
            outputs = evaluate(self._model, with_tensors(given.skeleton, tensors), None, ())
        except ResultError as error:
            raise ConfigError(f"the reference cannot be judged: {error}", where=self._path) from error
        draws = not torch.equal(unused, generator_state())
        if not any(output.numel() for output in outputs):
            self._refuse("the reference returns no elements", "return the tensors to compare")
        written = [
            tensor for tensor, *now in zip(tensors, _bits(tensors), before, strict=True) if not torch.equal(*now)
        ]
        self.may_change = self._problem.may_overwrite or bool(written)
        returned = {(output.data_ptr(), output.nbytes) for output in outputs}
        if not self._problem.may_overwrite and any((t.data_ptr(), t.nbytes) not in returned for t in written):
            self._refuse("the reference writes to an input that it does not return", "return that input")
        # What the first call keeps, such as a mask, later ones may read; what each changes is part of its result.
        state = self._state()
        self._evaluate(self._model, other, torch.clone)
        now = self._state()
        changed = {name for name in now.keys() | state if now.get(name) != state.get(name)}
        self.statistics = {name for name in changed if name.endswith(_STATISTICS)}
        if other_state := changed - self.statistics:
            self._refuse(f"each call of the reference changes its {min(other_state)}", "take and return it as a tensor")
        self._backward, self._forward = backward, len(outputs)
        self.results = [(tuple(output.shape), output.dtype) for output in outputs]
        given = self.arguments(self.seed)
        expected = self.eager(given)
        self.results = [(tuple(result.shape), result.dtype) for result in expected]
        self.accepted: Results = self.results
        for _ in range(3):
            synchronize(self.device)
            started = time.perf_counter()
            self.eager(given)
            synchronize(self.device)
            self.seconds = min(self.seconds, time.perf_counter() - started)
        self.has_exact = True
        try:
            exact = self.exact(given)
            # Float64 draws other random numbers.
            self.has_exact = not draws and exact is not None and all(map(_close, expected, exact))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # code that casts, or an operation without float64
            self.has_exact = False

    def _refuse(self, text: str, hint: str) -> NoReturn:
        raise ConfigError(text, where=self._path, hint=f"{hint}: the judge compares the results of each call only")

    def _state(self) -> dict[str, bytes]:
        """Return copies of the bytes of parameters, buffers, and tensors, numbers and texts in other attributes."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        for place, module in self._model.named_modules():
            own = vars(module).keys() - vars(torch.nn.Module()).keys()
            named += (leaf for name in own for leaf in _leaves(f"{place}.{name}".strip("."), vars(module)[name]))
        return {name: _bits([value])[0].cpu().numpy().tobytes() for name, value in dict(named).items()}

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


def _bits(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Return the bytes of tensors, in which NaN are equal."""
    return [tensor.flatten().contiguous().view(torch.uint8).clone() for tensor in tensors]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, and its numbers and texts as tensors, with their names."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _leaves(f"{name}.{key}", inside)
    elif isinstance(value, (list, tuple)):
        for number, inside in enumerate(value):
            yield from _leaves(f"{name}.{number}", inside)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, torch.tensor(list(repr(value).encode()), dtype=torch.uint8)


def _within(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    return tensor if most == math.inf else torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in twice its precision; integers are copied."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _moved(by_place: bool, sign: int, is_reversed: bool, random: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements differ by some units in their last place, and in that of their median.

    The difference grows with the place, and the result is in float64; or it is random.
    """
    wide = _widened(tensor)
    finite = wide[wide.isfinite()] if tensor.is_floating_point() and tensor.dtype.itemsize > 1 else wide[:0]
    if finite.numel():
        options: Any = {"dtype": torch.float64, "device": tensor.device}
        count = wide.numel()
        share = torch.linspace(0, 1, count, **options) if by_place else torch.rand(count, generator=random, **options)
        units = 4 * sign * max(torch.finfo(tensor.dtype).eps, 4 * torch.finfo(torch.float32).eps)
        share = (1 - share if is_reversed else share).view(wide.shape)
        moved = wide + units * (wide.abs() + finite.abs().median()) * share
        moved = 2 * moved.clamp(finite.min(), finite.max()) - moved  # within the range
        wide = torch.where(wide.isfinite(), moved, wide)
    return wide if by_place else wide.to(tensor.dtype)


def _close(eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether float64 computes the same thing as eager, which code that casts or reads bits does not.

    The whole tensors are compared, since sums of many 16-bit numbers may be far off at some elements. Results may be
    nothing but rounding errors of larger numbers.
    """
    if eager.shape != exact.shape:
        return False
    if not eager.is_floating_point():
        return bool((eager != exact).double().mean() <= _OTHER_INTEGERS)
    wide, exact = eager.double(), exact.double()
    difference = torch.where((wide == exact) | (wide.isnan() & exact.isnan()), 0.0, wide - exact)
    errors = max(16 * torch.finfo(eager.dtype).eps, 1e-4) * math.sqrt(exact.numel())
    return bool(difference.norm() <= 0.1 * exact[exact.isfinite()].norm() + errors)
