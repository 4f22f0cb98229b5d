"""Translates the host function that CuTe DSL compiles, of MLIR's LLVM dialect, to C++.

The function computes the grid, lays out arguments and descriptors, and launches the kernels. Integers are unsigned, as
LLVM's have no sign; operations on signed ones convert their operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kernel_aot.cpp_code import wrapped
from kernel_aot.llvm_types import Type, parse_type
from kernel_format.errors import ConfigError

# The operations that compute one value, with signed operands as `s`.
_VALUES = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "and": "{0} & {1}", "or": "{0} | {1}",
    "xor": "{0} ^ {1}", "shl": "{0} << {1}", "lshr": "{0} >> {1}", "ashr": "{s0} >> {1}",
    "fadd": "{0} + {1}", "fsub": "{0} - {1}", "fmul": "{0} * {1}", "fdiv": "{0} / {1}",
    "udiv": "aot::quotient({0}, {1})", "urem": "aot::remainder({0}, {1})",
    "sdiv": "aot::quotient({s0}, {s1})", "srem": "aot::remainder({s0}, {s1})",
    "intr.umax": "{0} < {1} ? {1} : {0}", "intr.umin": "{1} < {0} ? {1} : {0}",
    "intr.smax": "{s0} < {s1} ? {1} : {0}", "intr.smin": "{s1} < {s0} ? {1} : {0}",
    "zext": "{0}", "sext": "{s0}", "trunc": "{0}", "sitofp": "{s0}", "uitofp": "{0}", "fpext": "{0}", "fptrunc": "{0}",
    "select": "{0} ? {1} : {2}",
}  # fmt: skip
_COMPARED = ("{0} == {1}", "{0} != {1}", "{s0} < {s1}", "{s0} <= {s1}", "{s0} > {s1}", "{s0} >= {s1}",
             "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}")  # fmt: skip
_IGNORED = ("intr.lifetime.start", "intr.lifetime.end", "intr.assume", "unreachable")
_DYNAMIC = -(2**31)  # an index that is an operand
# cudaLaunchConfig_t, whose third member is the size of dynamic shared memory, and the fourth the stream.
_CONFIGURATION = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


class Host(NamedTuple):
    """A translated host function.

    Attributes:
        text: The C++, with `NAME` for the function's name.
        shared: The most dynamic shared memory of its launches; None if it is computed at run time.
        arguments: The types of its arguments.
    """

    text: str
    shared: int | None
    arguments: tuple[Type, ...]


def translate(blocks: Sequence[Mapping[str, Any]], kernels: Sequence[str], where: str) -> Host:
    """Return the C++ of a function.

    Args:
        blocks: The blocks with their arguments and operations, as `compile_cute.py` writes them.
        kernels: The names of the kernels that it launches.
        where: The place of the function, for errors.

    Raises:
        ConfigError: If it has an operation that is not supported.
    """
    try:
        return _Translator(blocks, kernels).function()
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"the compiled host code has {error}, which is not supported",
            where=where,
            hint="let the @cute.jit function compute sizes and layouts only, and launch kernels on its stream",
        ) from error


class _Translator:
    def __init__(self, blocks: Sequence[Mapping[str, Any]], kernels: Sequence[str]) -> None:
        self.blocks = blocks
        self.kernels = {f"@kernels_{name}": number for number, name in enumerate(kernels)}
        self.handles: dict[str, int] = {}  # values that are a kernel's handle, or its address
        self.constants: dict[str, str] = {}
        self.variables: dict[str, list[str]] = {}
        self.sizes: set[str] = set()  # pointers to the size of shared memory
        self.streams: set[str] = set()
        self.stops = False  # whether the block ends the process, after a message
        self.shared: int | None = 0

    def function(self) -> Host:
        list(self.lines())  # the constants, of which a block may use those of a later one
        self.variables.clear()
        body = list(self.lines())
        declared = [f"  {kind} {', '.join(names)};" for kind, names in self.variables.items()]
        head = "uint32_t NAME(aot::Kernel* kernels, int device, const void* const* arguments) {"
        text = "\n".join([head, *(part for line in (*declared, *body) for part in wrapped(line)), "}"])
        return Host(text, self.shared, tuple(parse_type(kind) for _, kind in self.blocks[0]["arguments"]))

    def lines(self) -> Iterator[str]:
        for number, block in enumerate(self.blocks):
            if number:
                yield f"block_{number}:"
            for position, (name, text) in enumerate(block["arguments"]):
                kind = self.variable(name, text)
                if number == 0:
                    yield f"  v{name} = aot::load<{kind.cpp}>(arguments[{position}]);"
            self.stops = any(operation["name"] == "intr.trap" for operation in block["operations"])
            for operation in block["operations"]:
                yield from (f"  {line}" for line in self.statements(operation))

    def variable(self, name: str, text: str) -> Type:
        kind = parse_type(text)
        self.variables.setdefault(kind.declared, []).append(f"v{name}")
        return kind

    def statements(self, operation: Mapping[str, Any]) -> Iterator[str]:
        """Yield the statements of an operation."""
        name, attributes = operation["name"], operation["attributes"]
        names = [each for each, _ in operation["operands"]]
        values = [self.constants.get(each, f"v{each}") for each in names]
        result, text = operation["results"][0] if operation["results"] else ("", "i32")
        callee = attributes.get("callee")
        if name in _IGNORED or (callee == "@printf" and self.stops):
            return
        if name == "mlir.constant":
            self.constants[result] = _constant(attributes["value"], parse_type(text))
        elif name == "mlir.addressof":
            self.constants[result] = "aot::Pointer{}"  # of a text for printf
            if attributes["global_name"] in self.kernels:
                self.handles[result] = self.kernels[attributes["global_name"]]
        elif name in ("mlir.undef", "mlir.poison", "mlir.zero"):
            self.constants[result] = f"{parse_type(text).declared}{{}}"
        elif name == "load" and names[0] in self.handles:
            self.handles[result] = self.handles[names[0]]
        elif name == "store":
            if names[1] in self.streams and names[0] in self.constants:
                raise ValueError("a launch without the stream")
            if names[1] in self.sizes:
                known = re.fullmatch(r"(\d+)ul", values[0])
                self.shared = max(self.shared, int(known[1])) if known and self.shared is not None else None
            kind = parse_type(operation["operands"][0][1])
            yield f"aot::store<{kind.cpp}>({values[1]}, {values[0]});"
        elif name == "return":
            yield f"return {values[0]};"
        elif name == "intr.trap":
            yield 'aot::fail("the host code of the kernel stopped");'
        elif name == "br":
            yield "{"
            yield from self.jump(operation["successors"][0], values)
            yield "}"
        elif name == "cond_br":
            first, second = operation["successors"]
            split = 1 + _numbers(attributes["operandSegmentSizes"])[1]
            yield f"if ({values[0]}) {{"
            yield from self.jump(first, values[1:split])
            yield "} else {"
            yield from self.jump(second, values[split:])
            yield "}"
        elif name == "insertvalue":
            offset, part = parse_type(text).inside(_numbers(attributes["position"]))
            self.variable(result, text)
            yield f"v{result} = {values[0]};"
            if part.size:
                yield f"aot::store<{part.cpp}>(v{result}.bytes + {offset}, {values[1]});"
        else:
            value = self.value(operation, result, parse_type(text), names, values)
            is_constant = name in ("getelementptr", "inttoptr") and all(each in self.constants for each in names)
            if name == "alloca" or is_constant:
                self.constants[result] = value
                return
            self.variable(result, text)
            yield f"v{result} = {value};"

    def jump(self, number: int, values: Sequence[str]) -> Iterator[str]:
        targets = [f"v{name}" for name, _ in self.blocks[number]["arguments"]]
        # All values are read before the first is assigned.
        yield from (f"const auto next_{target} = {value};" for target, value in zip(targets, values, strict=True))
        yield from (f"{target} = next_{target};" for target in targets)
        yield f"goto block_{number};"

    def value(
        self, operation: Mapping[str, Any], result: str, kind: Type, names: Sequence[str], values: Sequence[str]
    ) -> str:
        name, attributes = operation["name"], operation["attributes"]
        template = _VALUES.get(name)
        if name == "icmp":
            template = _COMPARED[int(attributes["predicate"].partition(" ")[0])]
        if template:
            signed = {f"s{position}": f"aot::as_signed({value})" for position, value in enumerate(values)}
            return f"static_cast<{kind.cpp}>({template.format(*values, **signed)})"
        if name in ("ptrtoint", "inttoptr"):
            return f"reinterpret_cast<{kind.cpp}>({values[0]})"
        if name == "load":
            return f"aot::load<{kind.cpp}>({values[0]})"
        if name == "bitcast":
            return f"aot::load<{kind.cpp}>(&{values[0]})"
        if name == "extractvalue":
            offset, _ = parse_type(operation["operands"][0][1]).inside(_numbers(attributes["position"]))
            return f"aot::load<{kind.cpp}>({values[0]}.bytes + {offset})"
        if name == "alloca":
            size = parse_type(attributes["elem_type"]).size * int(values[0].rstrip("ul"))
            align = max(16, int(attributes.get("alignment", "16").partition(" ")[0]))
            self.variables.setdefault(f"alignas({align}) char", []).append(f"bytes{result}[{max(size, 1)}]")
            return f"&bytes{result}[0]"
        if name == "getelementptr":
            return self.address(result, attributes, values)
        if name == "call" and attributes["callee"] == "@_cudaLaunchKernelEx":
            return f"aot::launch(kernels[{self.handles[names[1]]}], device, {values[0]}, {values[2]})"
        raise ValueError(f"the operation {name} {attributes.get('callee', '')}".strip())

    def address(self, result: str, attributes: Mapping[str, str], values: Sequence[str]) -> str:
        first, *path = _numbers(attributes["rawConstantIndices"])
        kind = parse_type(attributes["elem_type"])
        if attributes["elem_type"] == _CONFIGURATION and path in ([2], [3]):
            (self.sizes if path == [2] else self.streams).add(result)
        operands = iter(values[1:])
        terms, offset = [values[0]], 0 if first == _DYNAMIC else first * kind.size
        sizes = [kind.size]
        for index in path:
            sizes.append(kind.parts[0].size)
            inner, kind = kind.inside([0 if index == _DYNAMIC else index])
            offset += inner
        for index, size in zip([first, *path], sizes, strict=True):
            if index == _DYNAMIC:
                terms.append(f"{size} * static_cast<int64_t>(aot::as_signed({next(operands)}))")
        return " + ".join([*terms, str(offset)] if offset else terms)


def _constant(text: str, kind: Type) -> str:
    value = text.partition(" :")[0]
    if kind.cpp in ("bool", "float", "double") and re.fullmatch(r"[\w.+-]+", value) and not value.startswith("0x"):
        return value
    if not re.fullmatch(r"-?\d+", value):
        raise ValueError(f"the constant {text}")
    number = f"{int(value) % 2 ** (8 * kind.size)}{'ul' if kind.size == 8 else 'u'}"
    return number if kind.size >= 4 else f"{kind.cpp}{{{number}}}"


def _numbers(array: str) -> list[int]:
    """Return the numbers of `array<i64: 1, 0>`."""
    return [int(number) for number in re.findall(r"-?\d+", array.partition(":")[2])]
