"""GPU MODE: a directory with `task.yml` and `reference.py`, as on the leaderboards of gpu-mode/kernelbot.

`reference.py` defines `generate_input(**spec)`, `ref_kernel(data)` and `check_implementation(data, output)`, and a
submission defines `custom_kernel(data)`. The benchmarks are timed, and the tests are checked as well. A spec's seed is
replaced by a drawn one, as in leaderboard mode.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from kernel_format.errors import ConfigError
from kernel_format.files import write_files
from kernel_tasks.task import CANDIDATE, PROBLEM, Files, MachineError, Problem, Sizes, Task

FORMAT = "GPU MODE: a directory with task.yml"
_SUBMISSION = "@SUBMISSION@"
_KEYS = {"files", "lang", "tests", "benchmarks", "multi_gpu"}  # that are read, of those of kernelbot
_NEEDED = ("generate_input", "ref_kernel", "check_implementation")
_LARGEST_SEED = 2**31 - 1
_PLAIN = (torch.Tensor, int, float, bool, str, torch.dtype, type(None))
_MODEL = """import torch
from {module} import {function}


class {name}(torch.nn.Module):
    def forward(self, data):
        return {function}(data)
"""


@dataclass
class GpuModeTask(Task):
    """A task of a leaderboard."""

    submission: str = "submission.py"
    is_elementwise: bool = False

    def model_files(self, sizes: Sizes) -> Files:
        """Return the task's files, and a `Model` that calls `ref_kernel`."""
        return {
            **self._modules,
            PROBLEM: _MODEL.format(module="reference", function="ref_kernel", name="Model").encode(),
        }

    def candidate_files(self, path: Path) -> Files:
        """Return the task's files with the submission among them, and a `ModelNew` that calls `custom_kernel`."""
        if path.is_dir():
            path = path / self.submission
        if not path.is_file():
            raise ConfigError("does not exist; expected a submission", where=str(path), hint=self.form)
        if "custom_kernel" not in (text := path.read_text(encoding="utf-8", errors="replace")):
            close = difflib.get_close_matches("custom_kernel", re.findall(r"^def (\w+)", text, re.MULTILINE), n=1)
            hint = f"did you mean {close[0]!r}?" if close else self.form
            raise ConfigError("defines no custom_kernel", where=str(path), hint=hint)
        model = _MODEL.format(module=Path(self.submission).stem, function="custom_kernel", name="ModelNew")
        return {**self._modules, self.submission: path.read_bytes(), CANDIDATE: model.encode()}

    def problem(self, sizes: Sizes) -> Problem:
        """Return the reference with the inputs of a spec."""
        task, reference, forms = self, self._reference, [None]

        class Model(torch.nn.Module):
            def forward(self, data: Any) -> Any:
                forms[0] = task._run("ref_kernel", reference.ref_kernel, data)
                return forms[0]

        def get_inputs() -> list[Any]:
            spec = dict(sizes)
            if "seed" in spec:
                spec["seed"] = int(torch.randint(_LARGEST_SEED, (), device="cpu"))
            data = self._run("generate_input", reference.generate_input, **spec)
            if unknown := _unknown(data):
                raise ConfigError(
                    f"generate_input returns a {unknown}; expected tensors, numbers and text in lists, tuples and "
                    "dictionaries",
                    where=str(self.path / "reference.py"),
                    hint="the candidate runs in another process, which gets no other objects",
                )
            return [data]

        def fault(arguments: Any, results: Sequence[Any], expected: Sequence[Any]) -> str | None:
            output = _with_form(forms[0], iter(results))
            checked = self._run("check_implementation", reference.check_implementation, arguments[0], output)
            is_right, message = checked if isinstance(checked, tuple) else (not checked, checked)
            return None if is_right else str(message) or "check_implementation rejects it"

        # kernelbot checks each call, with a copy of its inputs: many tasks have a buffer for the result among them, and
        # torch.compile's CUDA graphs write each result over the one before.
        return Problem(Model, get_inputs, fault=fault, may_overwrite=True, decides_dtypes=True)

    def tolerance(self) -> str:
        """Return the rule for right results."""
        return "`check_implementation` in `reference.py` accepts them"

    def _run(self, name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (RuntimeError, AssertionError, ValueError, TypeError, ImportError) as error:
            if not torch.cuda.is_available() and re.search(r"cuda|nvidia|\bhip\b", str(error), re.IGNORECASE):
                raise MachineError(
                    f"{name} needs a GPU, and Torch finds none: {str(error).splitlines()[0].split('. ')[0]}",
                    where=str(self.path / "reference.py"),
                    hint="judge it on a machine with a GPU",
                ) from error
            raise

    @property
    def _modules(self) -> Files:
        return {name: data for name, data in self.files.items() if name != "task.yml"}

    @cached_property
    def _directory(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="task-")  # lives as long as the task

    @cached_property
    def _reference(self) -> Any:
        """Import `reference.py`, with `task`, `utils` and the like beside it."""
        directory, where = Path(self._directory.name), str(self.path / "reference.py")
        write_files(directory, self._modules)
        for name in self._modules:
            sys.modules.pop(Path(name).stem, None)  # another task's
        importlib.invalidate_caches()
        sys.path.insert(0, str(directory))
        try:
            reference = self._run("reference.py", importlib.import_module, "reference")
        except Exception as error:
            if isinstance(error, MachineError):
                raise
            raise ConfigError(
                f"cannot be run: {type(error).__name__}: {error}",
                where=where,
                hint="list the imported files in `files` of task.yml, such as `{name: utils.py, source: ../utils.py}`"
                if isinstance(error, ModuleNotFoundError)
                else None,
            ) from error
        finally:
            sys.path.remove(str(directory))
        if missing := [name for name in _NEEDED if not hasattr(reference, name)]:
            hint = "tasks with an evaluator of their own are not supported"
            raise ConfigError(f"defines no {missing[0]}; expected {', '.join(_NEEDED)}", where=where, hint=hint)
        return reference


def _with_form(value: Any, tensors: Iterator[Any]) -> Any:
    """Return tensors in the lists, tuples and dictionaries of a result."""
    if isinstance(value, dict):
        return {name: _with_form(item, tensors) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_form(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(tensors)


def _unknown(value: Any) -> str:
    """Return the type of a value in nested arguments that another process cannot get; empty if there is none."""
    if type(value) in (list, tuple):
        return next(filter(None, map(_unknown, value)), "")
    if type(value) is dict:
        return _unknown(list(value.values()))
    return "" if isinstance(value, _PLAIN) else f"{type(value).__module__}.{type(value).__qualname__}"


def recognizes(path: Path) -> bool:
    """Return whether a path is a `task.yml`, or a directory with one."""
    return path.name == "task.yml" or (path / "task.yml").is_file()


def read(path: Path) -> Task:
    """Read a directory with `task.yml`, or that file."""
    directory = path if path.is_dir() else path.parent
    file = directory / "task.yml"
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"is not YAML: {error}", where=str(file), hint="correct the line that is named") from error

    def refuse(
        key: str, problem: str, hint: str = "see gpu-mode/kernelbot", cause: Exception | None = None
    ) -> NoReturn:
        raise ConfigError(problem, where=f"{file}: {key}", hint=hint) from cause

    for key in set(settings) - _KEYS if isinstance(settings, dict) else ():
        if close := difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=0.8):
            refuse(key, "is not a key", f"did you mean {close[0]!r}?")
    for key, expected in (("files", list), ("lang", str), ("tests", list), ("benchmarks", list)):
        if not isinstance(settings, dict) or not isinstance(settings.get(key), expected):
            refuse(key, f"expected a {expected.__name__}")
    if settings["lang"] != "py":
        hint = "a reference in CUDA C++ needs the evaluator of kernelbot"
        refuse("lang", f'is {settings["lang"]!r}; expected "py"', hint)
    if settings.get("multi_gpu"):
        refuse("multi_gpu", "is true; the judge runs a candidate on one GPU", "use kernelbot")
    for key, names in (("files", ["name", "source"]), ("tests", []), ("benchmarks", [])):
        for number, entry in enumerate(settings[key]):
            texts = [*entry, *map(entry.get, names)] if isinstance(entry, dict) else [entry]
            if not isinstance(entry, dict) or not all(isinstance(text, str) for text in texts):
                refuse(f"{key}[{number}]", f"expected a mapping of {' and '.join(names) or 'names'} to values")
    files: Files = {}
    submission = "submission.py"
    for entry in settings["files"]:
        name, source = entry["name"], entry["source"]
        if source == _SUBMISSION:
            submission = name
            continue
        place, root = (directory / source).resolve(), directory.resolve()
        if not place.is_relative_to(root.parent.parent if place.suffix == ".py" else root):
            hint = "name a file of the task's directory, or a Python module up to two directories above: ../utils.py"
            refuse("files: source", f"{source} lies outside of the task", hint)
        try:
            files[name] = place.read_bytes()
        except OSError as error:
            hint = "a task needs the files beside its directory as well; clone the whole repository"
            refuse("files", f"{source} cannot be read: {error.strerror}", hint, error)
        entry["source"] = name  # where `save` writes it
    settings.pop("templates", None)
    timed, tests = settings["benchmarks"], settings["tests"]
    return GpuModeTask(
        name=directory.resolve().name,
        path=directory,
        files={"task.yml": yaml.safe_dump(settings, sort_keys=False).encode(), **files},
        form=f"A candidate (`{submission}`) defines `custom_kernel(data)`, which returns what `ref_kernel(data)` "
        "in `reference.py` returns. It may import `task` and `utils`.",
        workloads=tuple(timed + [spec for spec in tests if spec not in timed]),
        timed=len(timed),
        submission=submission,
    )
