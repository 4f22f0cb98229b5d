"""Definitions of FlashInfer Trace, with workloads: the schema that FlashInfer-Bench and SOL-ExecBench share.

A definition (JSON) has axes, named inputs and outputs, and a `reference` in Python that defines `run(*inputs)`. A
workload binds the variable axes, and states how each input is made: random, a scalar, from a file of safetensors, or by
a function of the reference.
"""

from __future__ import annotations

import json
import math
import shutil
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import safe_open

from kernel_format.errors import ConfigError
from kernel_format.files import LFS_POINTER
from kernel_tasks.definition_models import (
    DEFINITION,
    axis_values,
    model_of,
    read_json,
    run_reference,
    tensor_shape,
)
from kernel_tasks.solutions import candidate_program
from kernel_tasks.task import PROBLEM, Files, Problem, Sizes, Task

_KEYS = {"name": str, "axes": dict, "inputs": dict, "outputs": dict, "reference": str}
_AXES = {"var": "type", "const": "value", "expr": "expression"}  # type -> the key that it needs
_INTEGERS = ("int64", "int32", "int16", "int8", "bool")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", *_INTEGERS)
_LARGEST = {torch.int8: 128, torch.int16: 1024, torch.int32: 1024, torch.int64: 1024}


@dataclass
class DefinitionTask(Task):
    """A definition with its workloads; `blobs` is the directory to which paths of safetensors are relative.

    `layout` is the path of the workloads beside the definition.
    """

    layout: ClassVar[str]

    definition: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)  # uuid -> workload
    blobs: Path = Path()

    def wrong(self, workload: Mapping[str, Any], result: torch.Tensor, expected: torch.Tensor) -> str | None:
        """Return why an output is wrong by the format's rule, or None; both are in float32."""
        raise NotImplementedError

    def special(self, name: str, spec: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the random values that the format draws for an input of this name; None if it draws any."""
        return None

    def model_files(self, sizes: Sizes) -> Files:
        """Return the definition, and a `Model` that calls its reference."""
        text = "from kernel_tasks.definition_models import reference_model\n\nModel = reference_model(__file__)\n"
        return {DEFINITION: json.dumps(self.definition).encode(), PROBLEM: text.encode()}

    def candidate_files(self, path: Path) -> Files:
        """Return the sources of a solution, and a `ModelNew` that builds and calls it."""
        return candidate_program(path, self.definition)

    def weight(self, sizes: Sizes) -> int:
        """Return the number of elements of the inputs."""
        axes = axis_values(self.definition, sizes)
        shapes = (spec["shape"] for spec in self.definition["inputs"].values())
        return sum(math.prod(tensor_shape(shape, axes)) for shape in shapes if shape is not None)

    def problem(self, sizes: Sizes) -> Problem:
        """Return the reference with the inputs of a workload."""
        workload = self.sources[sizes["uuid"]]

        def fault(arguments: Any, results: Sequence[Any], expected: Sequence[Any]) -> str | None:
            for name, result, reference in zip(self.definition["outputs"], results, expected, strict=True):
                if text := self.wrong(workload, result.float(), reference.float()):
                    return f"output {name!r}: {text}"
            return None

        return Problem(self._model, lambda: self._inputs(workload, sizes), fault=fault)

    def save(self, directory: Path) -> Path:
        """Write the task's files, with the safetensors of its workloads."""
        saved = super().save(directory)
        for workload in self.sources.values():
            for name, entry in workload["inputs"].items():
                if entry["type"] == "safetensors" and not {"..", "/"}.intersection(Path(entry["path"]).parts):
                    (saved / entry["path"]).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self._blob(name, entry), saved / entry["path"])
        return saved

    @cached_property
    def _module(self) -> types.ModuleType:
        return run_reference(self.definition, str(self.path))

    @cached_property
    def _model(self) -> type[torch.nn.Module]:
        return model_of(self._module, self.definition)

    def _inputs(self, workload: Mapping[str, Any], sizes: Sizes) -> list[Any]:
        """Return a workload's inputs in the order of the definition."""
        axes = axis_values(self.definition, sizes)
        entries = workload["inputs"]
        made: Mapping[str, Any] = {}
        if any(entry["type"] == "custom" for entry in entries.values()):
            scalars = {name: entry["value"] for name, entry in entries.items() if entry["type"] == "scalar"}
            function = getattr(self._module, self.definition.get("custom_inputs_entrypoint") or "", None)
            if function is None:
                raise ConfigError(
                    "names no function of the reference, and a workload has custom inputs",
                    where=f"{self.path}: custom_inputs_entrypoint",
                    hint="name a function of the reference that returns the inputs",
                )
            made = function({**axes, **scalars}, torch.empty(0).device)
        inputs = []
        for name, spec in self.definition["inputs"].items():
            entry = entries.get(name, {"type": "random"})
            shape = None if spec["shape"] is None else tensor_shape(spec["shape"], axes)
            if entry["type"] == "scalar":
                inputs.append(entry["value"])
            elif entry["type"] == "custom":
                inputs.append(made[name])
            elif entry["type"] == "safetensors":
                inputs.append(self._loaded(name, entry, shape))
            elif shape is None:
                inputs.append(_random((), getattr(torch, spec["dtype"])).item())
            else:
                special = self.special(name, spec, shape)
                inputs.append(_random(shape, getattr(torch, spec["dtype"])) if special is None else special)
                if self.definition.get("op_type") == "sampling" and name == "probs":
                    inputs[-1] = inputs[-1].softmax(-1)
        return inputs

    def _blob(self, name: str, entry: Mapping[str, Any]) -> Path:
        """Return the file of an input; SOL-ExecBench's paths may start with directories of the data set."""
        given = Path(entry["path"])
        for start in range(given.is_absolute(), 0 if ".." in given.parts else len(given.parts)):
            path = self.blobs / Path(*given.parts[start:])
            if path.is_file():
                with path.open("rb") as file:
                    if file.read(len(LFS_POINTER)) != LFS_POINTER:
                        return path
        raise ConfigError(
            f"{entry['path']} is not in {self.blobs}",
            where=f"{self.path}: inputs.{name}.path of a workload",
            hint="download the blobs of the data set, for example with `git lfs pull`",
        )

    def _loaded(self, name: str, entry: Mapping[str, Any], shape: tuple[int, ...] | None) -> torch.Tensor:
        path = self._blob(name, entry)
        with safe_open(path, framework="pt") as file:
            if entry["tensor_key"] not in file.keys():  # noqa: SIM118 - it is not a dictionary
                raise ConfigError(f"has no tensor {entry['tensor_key']!r}", where=str(path), hint="see tensor_key")
            tensor: torch.Tensor = file.get_tensor(entry["tensor_key"])
        expected = shape, getattr(torch, self.definition["inputs"][name]["dtype"])
        if (tuple(tensor.shape), tensor.dtype) != expected:
            raise ConfigError(
                f"{entry['tensor_key']} has shape and dtype {tuple(tensor.shape), tensor.dtype}; expected {expected}",
                where=str(path),
                hint=f"correct the axes of the workload, or input {name} of the definition",
            )
        return tensor


_T = TypeVar("_T", bound=DefinitionTask)


def read_definition(task: type[_T], file: Path, workloads: Path, blobs: Path) -> _T:
    """Read a definition and its workloads.

    Raises:
        ConfigError: If a key is missing or has a value that is not supported; it names the file and the key.
    """
    definition = read_json(file)

    def check(key: str, is_right: bool, problem: str, hint: str = "see the schema") -> None:
        if not is_right:
            raise ConfigError(problem, where=f"{file}: {key}", hint=hint)

    for key, kind in _KEYS.items():
        check(key, isinstance(definition.get(key), kind), f"expected a {kind.__name__}")
    for name, axis in definition["axes"].items():
        is_axis = isinstance(axis, dict) and _AXES.get(str(axis.get("type"))) in axis
        check(f"axes.{name}", is_axis, f"expected a type with a key: {_AXES}")
    for group in ("inputs", "outputs"):
        for name, spec in definition[group].items():
            check(f"{group}.{name}", isinstance(spec, dict), "expected a dict")
            shape, dtype = spec.get("shape", 0), spec.get("dtype")
            check(f"{group}.{name}.shape", shape is None or isinstance(shape, list), "expected a list of axes, or null")
            problem = f"is {dtype!r}; expected one of {', '.join(_DTYPES)}"
            check(f"{group}.{name}.dtype", dtype in _DTYPES, problem, "a 4-bit dtype needs the format's own evaluator")
    if not workloads.is_file():
        raise ConfigError("there are no workloads", where=str(workloads), hint="write a line for each")
    sources, sizes = {}, []
    for number, line in enumerate(workloads.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            workload = entry.get("workload", entry)
            uuid = workload.get("uuid", str(number))
            sizes.append({**workload["axes"], "uuid": uuid})
            axis_values(definition, sizes[-1])
            sources[uuid] = workload | {"inputs": dict(workload["inputs"])}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"is not a workload of {definition['name']}: {type(error).__name__}: {error}",
                where=f"{workloads}: line {number}",
                hint="expected a JSON object with uuid, axes and inputs",
            ) from error
    return task(
        name=definition["name"],
        path=file,
        files={DEFINITION: file.read_bytes(), task.layout.format(name=definition["name"]): workloads.read_bytes()},
        form=f"A candidate defines `run({', '.join([*definition['inputs'], *definition['outputs']])})`, which writes "
        "its results into the last arguments, or `run` of the inputs only, which returns them.",
        workloads=tuple(sizes),
        timed=len(sizes),
        definition=definition,
        sources=sources,
        blobs=blobs,
    )


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random values as both formats' evaluators draw them."""
    if dtype in _LARGEST:
        return torch.randint(-_LARGEST[dtype], _LARGEST[dtype], tuple(shape), dtype=dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), dtype=torch.bool)
    if dtype.itemsize == 1:
        return torch.randn(tuple(shape)).clamp_(-2.0, 2.0).to(dtype)
    return torch.randn(tuple(shape), dtype=dtype)
