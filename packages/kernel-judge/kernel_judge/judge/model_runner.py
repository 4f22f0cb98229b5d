"""Runs a model in a worker: imports its class, calls it, and copies the results into the judge's memory."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernel_builder.api import poisoned
from kernel_judge.judge.arena import ArenaView
from kernel_judge.judge.evaluation import ResultError, evaluate, randomize, synchronize, with_tensors

_LONGEST_TEXT = 2000  # characters of an exception
_APIS = ("torch", "torch.Tensor", "torch.cuda", "torch.cuda.Event", "torch.nn.functional", "torch.testing", "gc", "sys")


def _functions(place: str) -> dict[str, Any]:
    """Return the public functions of a module or class."""
    first, *others = place.split(".")
    owner: Any = sys.modules.get(first) or importlib.import_module(first)
    for name in others:
        owner = getattr(owner, name)
    members: dict[str, Any] = {}
    for base in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        members.update(vars(base))
    return {name: value for name, value in members.items() if callable(value) and not name.startswith("__")}


def _is_torchs_own(function: Any) -> bool:
    """Return whether a function is Torch's: `torch.compile` wraps some of Torch's functions when it is first used."""
    code = getattr(function, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


class ModelRunner:
    """The state of a worker: its arenas, its models by number, and the results that it handed over last.

    `cores` are those of this process before Torch was imported.
    """

    def __init__(self, settings: dict[str, Any], cores: set[int]) -> None:
        self._cores = cores
        torch.set_num_threads(settings["threads"])
        # OpenMP has bound this thread, too, but others that it starts may run on all cores.
        os.sched_setaffinity(0, self._cores)
        self._settings = settings
        self._cuda = settings["device"] != "cpu"
        self._functions = {place: _functions(place) for place in _APIS}
        self._class: Any = None
        self._models: dict[int, tuple[Any, Sequence[str]]] = {}
        self._overwrites = False
        self._held: list[list[torch.Tensor]] = []
        self._slots: list[list[Any]] = []
        self._targets: list[list[torch.Tensor]] = []
        self._calls: list[Any] = []

    def open(self, inputs: Any, outputs: Any) -> None:
        """Open the judge's arenas."""
        self._inputs, self._outputs = ArenaView.opened(inputs), ArenaView.opened(outputs)
        self._judges_memory = self._outputs.addresses()

    def load(self, source: str, name: str, is_project: bool = False) -> None:
        """Import a file, which compiles its inline C++, and find the class in it."""
        if is_project and not self._cuda:
            import kernels

            # With a Torch for CUDA the client looks for a package for CUDA, also on a machine without a GPU.
            kernels.get_local_kernel = functools.partial(kernels.get_local_kernel, backend="cpu")
        sys.path.insert(0, str(Path(source).parent))
        spec = importlib.util.spec_from_file_location("candidate", source)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["candidate"] = module
        spec.loader.exec_module(module)
        self._class = getattr(module, name, None)
        if not (isinstance(self._class, type) and issubclass(self._class, torch.nn.Module)):
            raise ResultError("no-model", f"it defines no torch.nn.Module named {name}")

    def model(self, number: int, *settings: Any) -> list[Any]:
        """Construct a model: with the reference's seed, and with its parameters where names and shapes agree.

        `settings` are those of `Reference.model_arguments`. With `overwrites`, each call may write its result over the
        one before, as CUDA graphs of max-autotune do.

        Returns:
            Whether they agree, how many elements the model has in all, and which parameters got random values.
        """
        init, state, dtype, seed, mode, overwrites, parameters, random_parameters = settings
        torch.manual_seed(seed)
        model = self._class(*init).to(self._settings["device"])
        if dtype:
            model = model.to(getattr(torch, dtype))
        own = model.state_dict()
        agrees = own.keys() == state.keys() and all(own[name].shape == state[name].shape for name in own)
        replaced: list[list[float]] = []
        if agrees:
            model.load_state_dict(state)
        elif random_parameters:
            replaced = randomize(model, seed)
        elements = sum(tensor.numel() for tensor in own.values())
        if mode != "eager":
            model = torch.compile(model, mode=None if mode == "compile" else mode, dynamic=False)
        self._overwrites = overwrites
        self._models[number] = model, parameters
        return [agrees, elements, replaced]

    def call(self, number: int, call: Any, slots: list[Any], seed: int, poison: Sequence[int] | None) -> None:
        """Call a model once and copy its results into the slots."""
        arguments, grads = self._arguments(call)
        torch.manual_seed(seed)
        context = contextlib.nullcontext() if poison is None else poisoned(self._settings["device"], poison)
        with context:
            self._slots, self._targets = [slots], [[self._outputs.tensor(slot) for slot in slots]]
            self._held = [self._evaluate(number, arguments, grads)]
            self._hand_over()
        synchronize(self._settings["device"])

    def prepare(self, calls: list[Any], slots: list[list[Any]]) -> None:
        """Make the tensors of a run, which takes Python as long as a small kernel. `run` may get the skeletons."""
        self._calls = [self._arguments(call) for call in calls]
        self._held, self._slots = [], slots
        self._targets = [[self._outputs.tensor(slot) for slot in call] for call in slots]

    def run(self, number: int, seed: int, skeletons: list[Any] | None) -> float:
        """Call a model on each set of inputs, hand all results over, and return the seconds by this clock."""
        if skeletons:
            pairs = zip(skeletons, self._calls, strict=True)
            self._calls = [(with_tensors(skeleton, tensors), grads) for skeleton, (tensors, grads) in pairs]
        if self._settings["threads"] > 1:  # the first core is this thread's: OpenMP has bound the others to the rest
            os.sched_setaffinity(0, {min(self._cores)})
            os.sched_setaffinity(0, self._cores)
        torch.manual_seed(seed)
        synchronize(self._settings["device"])
        if self._cuda:
            event: Any = torch.cuda.Event
            first, last = (event(enable_timing=True) for _ in range(2))
            first.record()
        started = time.perf_counter()
        for count, (arguments, grads) in enumerate(self._calls):
            self._held.append(self._evaluate(number, arguments, grads))
            if self._overwrites:
                self._hand_over(count)
                self._held[count] = []
        if not self._overwrites:
            self._hand_over()
        if self._cuda:
            last.record()
            synchronize(self._settings["device"])
            return float(first.elapsed_time(last)) * 1e-3
        return time.perf_counter() - started

    def hand_over(self) -> None:
        """Copy the results of the last command once more."""
        synchronize(self._settings["device"])
        self._hand_over()
        synchronize(self._settings["device"])

    def patched(self) -> str | None:
        """Return the name of a function of Torch that was replaced, or None.

        It is for honest mistakes and plain cheats: code that patches Torch can patch this, too. The judge's own
        comparisons and clock are in another process.
        """
        for place, functions in self._functions.items():
            now = _functions(place)
            for name, function in functions.items():
                if now.get(name) is not function and not _is_torchs_own(now.get(name)):
                    return f"{place}.{name}"
        return None

    def _evaluate(self, number: int, arguments: Any, grads: Any) -> Any:
        model, parameters = self._models[number]
        return evaluate(model, arguments, grads, parameters)

    def _hand_over(self, only: int | None = None) -> None:
        calls = slice(None) if only is None else slice(only, only + 1)
        for held, slots, targets in zip(self._held[calls], self._slots[calls], self._targets[calls], strict=True):
            if len(held) != len(slots):
                raise ResultError("wrong-shape", f"it returns {len(held)} tensors; expected {len(slots)}")
            for result, slot, target in zip(held, slots, targets, strict=True):
                name = str(result.dtype).removeprefix("torch.")
                if tuple(result.shape) != tuple(slot.shape):
                    shapes = f"{tuple(result.shape)}; expected {tuple(slot.shape)}"
                    raise ResultError("wrong-shape", f"a result has the shape {shapes}")
                if name != slot.dtype:
                    raise ResultError("wrong-dtype", f"a result is {name}; expected {slot.dtype}")
                if result.data_ptr() in self._judges_memory:  # the copy, whose time is subtracted, would cost nothing
                    raise ResultError("forged-answer", "a result is in the judge's memory; return memory of your own")
                if not result.is_contiguous() and _overlaps(result):
                    strides = f"a result of shape {list(result.shape)} has strides {result.stride()}"
                    raise ResultError("wrong-strides", f"{strides}: elements share memory; allocate all of it")
                target.copy_(result)

    def dtypes(self) -> list[str]:
        """Return the names of the dtypes of the results of the last call."""
        return [str(result.dtype).removeprefix("torch.") for result in self._held[0]]

    def _arguments(self, call: Any) -> Any:
        skeleton, slots, grads = call
        tensors = [self._inputs.tensor(slot) for slot in slots]
        arguments = tensors if skeleton is None else with_tensors(skeleton, tensors)
        return arguments, None if grads is None else [self._inputs.tensor(slot) for slot in grads]


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor have one address."""
    reach = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step < reach:
                return True
            reach = step * (length - 1) + reach
    return False


def answer(runner: ModelRunner, command: str, arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        value = getattr(runner, command)(*arguments)
        if patched := runner.patched():
            return {"failed": "patched", "text": f"it replaces {patched}"}
        return {"value": value}
    except ResultError as error:
        return {"failed": error.kind, "text": str(error)}
    except Exception as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        if len(text) > _LONGEST_TEXT:  # compilers name the file at the start, and the error at the end
            text = f"{text[: _LONGEST_TEXT // 4]}\n[...]\n{text[-_LONGEST_TEXT * 3 // 4 :]}"
        place = next((frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.name), None)
        where = f" (line {place.lineno} of {Path(place.filename).name})" if place else ""
        return {"failed": "raised", "text": text + where}
