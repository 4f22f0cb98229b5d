"""The C++ of a generated project: one file for each op, its cubins, and the registration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kernel_aot.expressions import Expression
from kernel_aot.ops import DTYPES, Argument, Config, Op, Output

_TYPES = {"Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool"}
_VALUES = {
    "i8": "int8_t", "i16": "int16_t", "i64": "int64_t", "u1": "uint8_t", "i1": "uint8_t", "u8": "uint8_t",
    "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "fp32": "float", "fp64": "double",
}  # fmt: skip
_WIDTH = 120


def binding(project: str, ops: Sequence[Op]) -> str:
    """Return the registration of the ops."""
    parts = [
        "// Registers the ops. kernel-builder made this file of aot.toml.",
        '#include "aot/launch.h"',
        '#include "registration.h"',
        "",
        f'const char* const aot::kProject = "{project}";',
        "",
        "using torch::stable::Tensor;",
        "",
        *(f"{_result(op)} {op.name}({_parameters(op)});" for op in ops),
        "",
        "STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {",
        *(f'  ops.def("{op.name}{op.schema}");' for op in ops),
        "}",
        "",
        "STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {",
        *(f'  ops.impl("{op.name}", TORCH_BOX(&{op.name}));' for op in ops),
        "}",
        "",
        "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)",
    ]
    return "\n".join(parts) + "\n"


def launcher(op: Op, source: str, header: str, table: str, launch: Iterable[str]) -> str:
    """Return the function of an op, which checks, allocates, chooses a compiled kernel and launches it.

    Args:
        table: The declaration of the compiled kernels.
        launch: The statements that launch a kernel of the table, after those that choose `config`.
    """
    body = [*_prepared(op), *launch, *_returned(op)]
    lines = [
        f"// The op {op.name}: {op.kernel} of {source}. kernel-builder made this file of aot.toml.",
        f'#include "aot/{header}"',
        "",
        "using torch::stable::Tensor;",
        "",
        f"extern {table};",
        "",
        f"{_result(op)} {op.name}({_parameters(op)}) {{",
        *(part for line in body for part in wrapped(f"  {line}".rstrip())),
        "}",
    ]
    return "\n".join(lines) + "\n"


def wrapped(line: str) -> Iterator[str]:
    """Yield a line in parts of at most 120 characters, broken after commas and before operators outside of strings."""
    while len(line) > _WIDTH:
        breaks = [
            position
            for position in range(20, _WIDTH)
            if line[position] == " "
            and line[:position].count('"') % 2 == 0
            and (line[position - 1] in ",;" or line[position + 1 : position + 3] in ("&&", "||"))
        ]
        if not breaks:
            break
        yield line[: breaks[-1]]
        line = " " * (len(line) - len(line.lstrip()) + (0 if line.startswith("      ") else 4)) + line[breaks[-1] + 1 :]
    yield line


def _result(op: Op) -> str:
    if not op.outputs:
        return "void"
    return "Tensor" if len(op.outputs) == 1 else f"std::tuple<{', '.join(['Tensor'] * len(op.outputs))}>"


def _parameters(op: Op) -> str:
    return ", ".join(f"{_TYPES[parameter.kind]} {parameter.name}" for parameter in op.parameters)


def _prepared(op: Op) -> Iterator[str]:
    first = op.first_tensor
    yield from _checks(op)
    yield ""
    yield f"const aot::Device device({first}.get_device_index());"
    for output in op.outputs:
        code = _dtype(output)
        zeros = str(output.zeros).lower()
        if output.like:
            yield f'Tensor {output.name} = aot::allocate_like({output.like}, "{output.like}", {code}, {zeros});'
        else:
            sizes = ", ".join(size.cpp for size in output.sizes)
            yield f"Tensor {output.name} = aot::allocate({{{sizes}}}, {code}, {first}, {zeros});"
    yield from _values(op)
    yield ""
    yield from _configs(op)


def _returned(op: Op) -> Iterator[str]:
    if op.outputs:
        names = ", ".join(output.name for output in op.outputs)
        yield f"return {names};" if len(op.outputs) == 1 else f"return {{{names}}};"


def configuration(op: Op) -> str:
    """Return the position of the call's dtype and row in the table of compiled kernels."""
    return f"dtype * {len(op.configs)} + config" if len(op.dtypes) > 1 else "config"


def _dtype(output: Output) -> str:
    return output.dtype.cpp if output.dtype else f"aot::dtype({output.like})"


def _checks(op: Op) -> Iterator[str]:
    """Yield the checks of the tensors, and the conditions of aot.toml."""
    first = op.first_tensor
    for name in op.tensors:
        yield f'aot::check_device({name}, "{name}", {first}, "{first}");'
    yield from _dtype_checks(op)
    yield from (f'aot::check_contiguous({name}, "{name}");' for name in op.contiguous)
    for condition in op.requires:
        yield f'aot::require({condition.cpp}, "{condition.python}", {{{", ".join(condition.sides)}}});'


def _dtype_checks(op: Op) -> Iterator[str]:
    """Yield the checks of the kernel's types: of parameters, then of outputs, which may have dtypes of others."""
    tensors = [(name, name, f"aot::dtype({name})") for name in op.tensors]
    tensors += [(output.name, output.like or output.name, _dtype(output)) for output in op.outputs]
    of_dtype = ""  # the tensor that determines T
    for name, shown, code in tensors:
        for argument in op.arguments:
            if argument.value.cpp != name or not argument.is_tensor:
                continue
            if argument.type != "*T":
                dtype = DTYPES[argument.type[1:]]
                if code != f"aot::dtype_{dtype}()":
                    yield f'aot::check_dtype({code}, "{shown}", aot::dtype_{dtype}(), "{dtype}");'
            elif not of_dtype:
                of_dtype, code_of_dtype = shown, code
                codes = ", ".join(f"aot::dtype_{dtype}()" for dtype in op.dtypes)
                expected = f"{', '.join(op.dtypes[:-1])} or {op.dtypes[-1]}" if op.dtypes[1:] else op.dtypes[0]
                used = "const int dtype = " if len(op.dtypes) > 1 else ""
                yield f'{used}aot::dtype_index({code}, "{shown}", {{{codes}}}, "{expected}");'
            elif code != code_of_dtype:
                yield f'aot::check_dtype({code}, "{shown}", {code_of_dtype}, "of the dtype of {of_dtype}");'


def _values(op: Op) -> Iterator[str]:
    """Yield the kernel's integer and floating-point arguments, whose names expressions use."""
    known = {parameter.name for parameter in op.parameters}
    for argument in op.arguments:
        if not argument.is_tensor and argument.name not in known:
            yield f"const {_TYPES[argument.value.kind]} {argument.name} = {argument.value.cpp};"
    for argument in op.arguments:
        if argument.type == "1":
            yield f'aot::require({argument.name} == 1, "{argument.value.python} == 1", {{{argument.name}}});'


def _configs(op: Op) -> Iterator[str]:
    yield "int config = 0;"
    shared = {tuple(size.cpp for size in grid) for grid in op.grids}
    constants = {name for config in op.configs for name in (*op.constants, *config.constants)}
    common = len(shared) == 1 and not any(_uses(op.grids[0], name) for name in constants)
    sizes = ", ".join([*next(iter(shared)), "1", "1"][:3]) if common else "1, 1, 1"
    if any(op.grids):
        yield f"{'const ' if common else ''}int64_t grid[3] = {{{sizes}}};"
    branch = ""
    for number, (config, grid) in enumerate(zip(op.configs, op.grids, strict=True)):
        if config.when:
            yield f"{branch}if ({config.when.cpp}) {{"
        else:
            yield f"{branch}{{"
        yield from (f"  {line}" for line in _chosen(op, number, config, () if common else grid))
        if config.when is None:
            yield "}"
            return
        branch = "} else "
    limits = " or ".join(config.when.python for config in op.configs if config.when)
    yield "} else {"
    yield f'  aot::fail("no compiled configuration of {op.name} fits; expected {limits}");'
    yield "}"


def _chosen(op: Op, number: int, config: Config, grid: Sequence[Expression]) -> Iterator[str]:
    for name, value in {**op.constants, **config.constants}.items():
        if _uses(grid, name) and isinstance(value, int):
            yield f"const int64_t {name} = {int(value)};"
    yield f"config = {number};"
    yield from (f"grid[{axis}] = {size.cpp};" for axis, size in enumerate(grid))


def _uses(grid: Sequence[Expression], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", size.cpp) for size in grid)


def stored(op: Op, argument: Argument) -> Iterator[str]:
    """Yield the variable that an argument of the kernel points to, and the check of its alignment."""
    name = f"{argument.name}_value"
    if argument.is_tensor:
        tensor = argument.value.cpp
        is_read = any(parameter.name == tensor and not parameter.is_mutated for parameter in op.parameters)
        kind, access = ("const void", "const") if is_read else ("void", "mutable")
        yield f"{kind}* {name} = {tensor}.{access}_data_ptr();"
    elif argument.type == "i32":
        yield f'int32_t {name} = aot::int32({argument.name}, "{argument.name}");'
    elif argument.type == "int":
        yield f"int64_t {name} = {argument.name};"
        yield f"int32_t {argument.name}_narrow = static_cast<int32_t>({argument.name});"
    else:
        yield f"{_VALUES[argument.type]} {name} = static_cast<{_VALUES[argument.type]}>({argument.name});"
    if argument.is_divisible:
        checked, value = (name, "") if argument.is_tensor else (argument.name, argument.name)
        text = f"the address of {argument.value.python}" if argument.is_tensor else argument.value.python
        yield f'aot::require(aot::divisible({checked}), "{text} to be divisible by 16", {{{value}}});'
