"""The ops of a project, with their expressions and compiled configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from kernel_aot.expressions import Expression

# Types of Triton -> dtypes of Torch, for pointers.
DTYPES: Mapping[str, str] = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "i1": "bool",
    "u8": "uint8",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
_LANGUAGE = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}  # other names of dtypes in triton.language


@dataclass(frozen=True)
class Parameter:
    """A parameter of the op: `kind` is `Tensor`, `int`, `float` or `bool`."""

    kind: str
    name: str
    default: str | None
    is_mutated: bool


@dataclass(frozen=True)
class Output:
    """A tensor that the op allocates: like an argument, or with sizes of its own."""

    name: str
    like: str | None
    sizes: tuple[Expression, ...]
    dtype: Expression | None
    zeros: bool


@dataclass(frozen=True)
class Argument:
    """A value that the kernel receives: its parameter there, the expression, and its type in Triton."""

    name: str
    value: Expression
    type: str
    is_divisible: bool  # by 16; else the call is refused

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("*")


@dataclass(frozen=True)
class Config:
    """A row of `config`: compiled values, and the condition for its use."""

    when: Expression | None
    constants: Mapping[str, Any]
    options: Mapping[str, int]


@dataclass(frozen=True)
class Op:
    """An op, whose kernel is compiled for each dtype and configuration."""

    name: str
    kernel: str
    dtypes: tuple[str, ...]
    schema: str  # without the name
    parameters: tuple[Parameter, ...]
    outputs: tuple[Output, ...]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    requires: tuple[Expression, ...]
    contiguous: tuple[str, ...]
    configs: tuple[Config, ...]
    grids: tuple[tuple[Expression, ...], ...]  # of each configuration
    prefer_shared: bool  # rather than L1, as Triton's launcher sets it

    @property
    def tensors(self) -> list[str]:
        """The parameters that are tensors."""
        return [parameter.name for parameter in self.parameters if parameter.kind == "Tensor"]

    @property
    def first_tensor(self) -> str:
        """The parameter whose device and stream the op uses."""
        return self.tensors[0]

    @property
    def hints(self) -> tuple[tuple[str, ...], ...]:
        """The arguments that compilations take as divisible by 16: all of `divisible`, its pointers, and none."""
        own = [argument for argument in self.arguments if argument.name in self.divisible and argument.type != "1"]
        pointers = tuple(argument.name for argument in own if argument.is_tensor)
        return tuple(dict.fromkeys([tuple(argument.name for argument in own), pointers, ()]))


@dataclass(frozen=True)
class Variant:
    """One compilation of an op's kernel for a capability: its position in the op's table, and Triton's inputs."""

    op: Op
    config: Config
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...]
    label: str


def variants(op: Op) -> Iterator[Variant]:
    """Yield the compilations of an op, in the order in which the generated code counts them."""
    widths = ("i32", "i64") if any(argument.type == "int" for argument in op.arguments) else ("i32",)
    always = {argument.name for argument in op.arguments if argument.is_divisible}
    for dtype, config, hints, width in product(op.dtypes or ("",), op.configs, op.hints, widths):
        types = {argument.name: argument.type.replace("T", _TYPES.get(dtype, "")) for argument in op.arguments}
        signature = {name: width if kind == "int" else kind for name, kind in types.items() if kind != "1"}
        ones = {name: 1 for name, kind in types.items() if kind == "1"}
        values = [f"{name} {value}" for name, value in {**config.constants, **config.options}.items()]
        label = f"{op.name} ({', '.join(filter(None, [dtype, *values]))})"
        divisible = tuple(name for name in signature if name in always.union(hints))
        constants = {**op.constants, **config.constants, **ones}
        constants |= {name: f"tl.{_LANGUAGE.get(dtype, dtype)}" for name, value in constants.items() if value == "tl.T"}
        yield Variant(op, config, signature, constants, divisible, label)
