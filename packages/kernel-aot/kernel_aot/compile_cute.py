"""Compiles functions of CuTe DSL, in a sandbox and without a GPU. It uses the standard library and CuTe DSL only.

    python -I -S compile_cute.py REQUEST CUTE_DSL

REQUEST is that of `compile_kernels.py`; a job has the parameters of a `@cute.jit` function. Its results are the machine
code of the kernels, and the operations of the compiled host function, which lays out arguments and launches them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from compile_kernels import import_module, in_processes, run  # the file beside this one

del sys.path[0]


def _argument(parameter: dict[str, Any], symbols: dict[str, Any]) -> Any:
    """Return the value that a parameter is compiled with."""
    import cutlass.cute.runtime

    cute = cutlass.cute
    kind, value = parameter["kind"], parameter.get("value", ())
    if kind == "stream":
        return cute.runtime.make_fake_stream()
    if kind == "constant":
        return getattr(cutlass, value[8:]) if isinstance(value, str) and value.startswith("cutlass.") else value
    dtype = getattr(cutlass, parameter["dtype"])
    if kind == "value":
        return dtype(1)
    align = parameter["align"]
    elements = max(1, align * 8 // dtype.width)
    shape = [size if isinstance(size, int) else symbols.setdefault(size, cute.sym_int()) for size in value]
    strides = [cute.sym_int64(divisibility=elements) for _ in shape[1:]]
    return cute.runtime.make_fake_tensor(
        dtype, tuple(shape), stride=(*strides, 1), assumed_align=max(align, dtype.width // 8, 1)
    )


def _compile(module: Any, job: dict[str, Any], out: Path) -> dict[str, Any]:
    from cutlass import cute

    symbols: dict[str, Any] = {}
    arguments = {name: _argument(parameter, symbols) for name, parameter in job["parameters"].items()}
    try:
        compiled = cute.compile(getattr(module, job["kernel"]), **arguments)
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__
        ]
        error.line = getattr(error, "line", None) or (lines or [None])[-1]  # type: ignore[attr-defined]
        raise
    operations = {str(each.attributes["sym_name"].value): each for each in compiled.ir_module.body.operations}
    binaries = [name for name in operations if name.endswith("_binary")]
    if len(binaries) != 1:
        raise ValueError(f"the function launches kernels of {len(binaries)} modules; expected one")
    out.with_suffix(".cubin").write_bytes(operations[binaries[0]].attributes["value"].value_bytes)
    with compiled.ir_module.context:
        host = _function(operations[compiled.function_name])
    return {"kernels": list(compiled.kernel_info), "host": host}


def _function(function: Any) -> list[dict[str, Any]]:
    """Return the blocks of a function of MLIR's LLVM dialect, with values by their names in its text."""
    blocks = list(function.regions[0].blocks)
    return [
        {
            "arguments": _typed(block.arguments),
            "operations": [
                {
                    "name": operation.operation.name.removeprefix("llvm."),
                    "results": _typed(operation.operation.results),
                    "operands": _typed(operation.operation.operands),
                    "attributes": {key: str(operation.attributes[key]) for key in operation.attributes},
                    "successors": [blocks.index(each) for each in operation.operation.successors],
                }
                for operation in block.operations
            ],
        }
        for block in blocks
    ]


def _typed(values: Any) -> list[tuple[str, str]]:
    return [(value.get_name(use_local_scope=True).removeprefix("%"), str(value.type)) for value in values]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    root = Path(sys.argv[2])
    sys.path[:0] = [str(root), str(root / "nvidia_cutlass_dsl/dsl_packages")]
    of_capability: dict[int, list[Any]] = {}
    for job in request["jobs"]:
        of_capability.setdefault(job["target"][1], []).append(job)
    count = max(1, request["processes"] // len(of_capability))
    parts = [(key, jobs[part::count]) for key, jobs in of_capability.items() for part in range(count) if jobs[part:]]
    in_processes(parts, request["processes"], lambda part: _compile_for(part[0], part[1], request))


def _compile_for(capability: int, jobs: list[dict[str, Any]], request: dict[str, Any]) -> None:
    # CuTe DSL reads it when it is imported.
    os.environ["CUTE_DSL_ARCH"] = f"sm_{capability}{'a' if capability >= 90 else ''}"
    import cutlass.cute  # noqa: F401  # before the placeholders, which it must not find

    run(import_module(request, ("cutlass", "cuda")), jobs, _compile)


if __name__ == "__main__":
    main()
