"""Compiles Triton kernels to cubins, in a sandbox and without a GPU. It uses the standard library and Triton only.

    python -I -S compile_kernels.py REQUEST TRITON

REQUEST is a JSON file: `package` and `module`, the author's package and its module with the kernels; `jobs`, and
`processes`. Each job has a result, `out/N.json`, and a cubin `out/N.cubin`. Modules that the author's module imports
and that are not here, Torch above all, are placeholders.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

OUT = Path("out")
_Part = TypeVar("_Part")


class _Placeholder(types.ModuleType):
    """A module that is not here, and everything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # As a decorator it leaves the function as it is.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__
    __getitem__ = __or__


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module that no other finder has, apart from those of some packages."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Placeholder(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def import_module(request: dict[str, Any], compilers: Iterable[str]) -> Any:
    """Import the author's module without running the package's `__init__.py`, which needs the compiled ops.

    If the module cannot be imported, the error becomes the result, and the process ends.
    """
    package = request["package"]
    parent = types.ModuleType(package)
    parent.__path__ = [str(Path("src", package))]
    sys.modules[package] = parent
    sys.meta_path.append(_Absent(package, *compilers))
    try:
        return importlib.import_module(request["module"])
    except BaseException as error:
        (OUT / "error.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(0)


def in_processes(parts: Sequence[_Part], most: int, work: Callable[[_Part], None]) -> None:
    """Call a function with each part in a process of its own, at most `most` at a time."""
    for number, part in enumerate(parts):
        if number >= most:
            os.wait()
        if os.fork() == 0:
            try:
                work(part)
            finally:
                os._exit(0)
    for _ in parts[:most]:
        os.wait()


def _compile(module: Any, job: dict[str, Any], out: Path) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, job["kernel"])
    while not isinstance(function, triton.runtime.JITFunction):
        function = function.fn  # of triton.autotune and triton.heuristics
    names = list(function.arg_names)
    signature = {name: job["signature"].get(name, "constexpr") for name in names}
    defaults = {p.name: p.default for p in function.params if p.has_default}
    constants = {**defaults, **job["constants"]}
    for name, value in constants.items():
        if isinstance(value, str) and value.startswith("tl."):
            constants[name] = getattr(triton.language, value[3:])  # a dtype
    source = ASTSource(
        function,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if signature[name] == "constexpr"},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]},
    )
    kernel = triton.compile(source, target=GPUTarget(*job["target"]), options=job["options"])
    image, text = ("hsaco", "llir") if job["target"][0] == "hip" else ("cubin", "ptx")
    if "printf" in kernel.asm[text]:
        lines = enumerate(Path(module.__file__).read_text().splitlines(), 1)
        error: Any = ValueError("tl.device_print is not supported: remove it")
        error.line = next((number for number, line in lines if "device_print(" in line), None)
        raise error
    out.with_suffix(".cubin").write_bytes(kernel.asm[image])
    out.with_suffix(".ptx").write_text(kernel.asm[text])
    metadata = kernel.metadata
    return {
        "name": metadata.name,
        "shared": metadata.shared,
        "threads": metadata.warp_size * metadata.num_warps,
        "scratch": getattr(metadata, "global_scratch_size", 0) or 0,
    }


def run(module: Any, jobs: list[dict[str, Any]], compiled: Callable[..., dict[str, Any]]) -> None:
    """Write the results of jobs, which a function compiles."""
    for job in jobs:
        file = OUT / str(job["number"])
        try:
            result = compiled(module, job, file)
        except BaseException as error:
            cause: Any = error
            while cause.__cause__ is not None:  # the innermost error is the one of the author's line
                cause = cause.__cause__
            node = getattr(error, "node", None)
            first = getattr(getattr(module, job["kernel"], None), "starting_line_number", 1)
            number: int | None = getattr(node, "lineno", None)
            line = getattr(error, "line", None) if number is None else first + number - 1
            text = str(getattr(cause, "error_message", None) or cause) or type(cause).__name__
            result = {"error": text, "line": line}
        file.with_suffix(".json").write_text(json.dumps(result))


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, sys.argv[2])
    import triton  # noqa: F401  # before the placeholders, which it must not find

    module = import_module(request, ("triton",))
    jobs = request["jobs"]
    count = min(request["processes"], len(jobs))
    in_processes(range(count), count, lambda number: run(module, jobs[number::count], _compile))


if __name__ == "__main__":
    main()
