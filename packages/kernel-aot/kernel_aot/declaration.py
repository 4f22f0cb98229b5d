"""Completes the tables of aot.toml: ops with their schemas, expressions and compiled configurations.

Keys that an op's table leaves out are read from its launch function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_aot import launch_function
from kernel_aot.expressions import Expression, is_plain, translate
from kernel_format.errors import ConfigError

OPTIONS = {"num_warps": 4, "num_stages": 3}
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
_DEFAULT_TYPES = {"Tensor": "*T", "int": "i32", "float": "fp32", "bool": "u1"}
_PARAMETER = re.compile(r"(Tensor|int|float|bool)(\(\w!\))? (\w+)(?:=(\S+))?")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the op: `kind` is `Tensor`, `int`, `float` or `bool`."""

    kind: str
    name: str
    default: str | None
    is_mutated: bool
    text: str  # as in the schema


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

    @property
    def results(self) -> int:
        return len(self.outputs)

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
    for dtype in op.dtypes or ("",):
        for config in op.configs:
            for hints in op.hints:
                for wide in (False, True) if any(a.type == "int" for a in op.arguments) else (False,):
                    signature, constants = {}, {**op.constants, **config.constants}
                    for argument in op.arguments:
                        kind = (
                            argument.type.replace("T", _TYPES.get(dtype, "")) if "T" in argument.type else argument.type
                        )
                        if kind == "1":
                            constants[argument.name] = 1
                        else:
                            signature[argument.name] = ("i64" if wide else "i32") if kind == "int" else kind
                    values = ", ".join(
                        f"{name} {value}" for name, value in {**config.constants, **config.options}.items()
                    )
                    label = f"{op.name} ({', '.join(filter(None, [dtype, values]))})"
                    always = {argument.name for argument in op.arguments if argument.is_divisible}
                    chosen = always.union(hints)
                    divisible = tuple(name for name in signature if name in chosen)
                    yield Variant(op, config, signature, constants, divisible, label)


def read_ops(root: Path, tables: Mapping[str, Any], reader: type[Reader]) -> tuple[Op, ...]:
    """Return the ops that the tables of a project's aot.toml declare.

    Args:
        root: The project's directory.
        reader: The class that reads the ops' tables of the project's language.

    Raises:
        ConfigError: If a table does not fit its kernel, or has an expression that is none.
    """
    source = root / tables["source"]
    try:
        module = ast.parse(source.read_text(encoding="utf-8"), str(source))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not Python: {error}", where=str(source)) from error
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    return tuple(reader(root, source, functions, name, table).read() for name, table in tables["op"].items())


class Reader:
    """Reads one op's table.

    Attributes:
        options: The options of rows, and their defaults.
        passed: Constexpr -> the expression that the launch function passes for it.
        sizes: The names of tensors' sizes, which rows may set.
        supplied: The parameters of the kernel that are neither arguments nor constants.
    """

    options: Mapping[str, int] = OPTIONS
    sizes: Sequence[str] = ()
    supplied: Sequence[str] = ()

    def __init__(
        self, root: Path, source: Path, functions: Mapping[str, ast.FunctionDef], name: str, table: Mapping[str, Any]
    ) -> None:
        self.file, self.source, self.functions, self.name = str(root / "aot.toml"), source, functions, name
        self.table = dict(table)
        self.passed: dict[str, str] = {}

    def read(self) -> Op:
        table = self.table
        if table["kernel"] not in self.functions:
            known = ", ".join(name for name, node in self.functions.items() if node.decorator_list)
            raise self.error("kernel", f"{self.source.name} has no function {table['kernel']}", f"it has {known}")
        missing = [key for key in ("schema", "outputs", "arguments", "grid") if key not in table]
        derived = launch_function.read(self.source, self.name) if missing else {}
        for key in missing:
            table[key] = derived[key]
        self.passed |= derived.get("passed", {})
        self.scope: dict[str, str] = {}
        parameters = self.parameters()
        self.scope |= {parameter.name: parameter.kind for parameter in parameters}
        outputs = tuple(self.output(name, text) for name, text in table["outputs"].items())
        self.scope |= dict.fromkeys(table["outputs"], "Tensor")
        arguments = tuple(self.arguments())
        values = {argument.name: argument.value.kind for argument in arguments if not argument.is_tensor}
        scope = {**values, **self.scope}
        constants = {**derived.get("constants", {}), **table.get("constants", {})}
        configs = tuple(self.configs(scope, constants))
        requires = [*derived.get("requires", ()), *table.get("requires", ())]
        grids = []
        for config in configs:
            compiled = {name: _kind(value) for name, value in {**constants, **config.constants}.items()}
            where = self.where("grid")
            grids.append(tuple(translate(size, {**scope, **compiled}, where) for size in table["grid"]))
        for name in table.get("divisible", ()):
            if name not in {argument.name for argument in arguments}:
                raise self.error("divisible", f"{name} is no argument of {table['kernel']}", "name its parameters")
        return Op(
            name=self.name,
            kernel=table["kernel"],
            dtypes=tuple(table.get("dtypes", ())),
            schema=table["schema"],
            parameters=parameters,
            outputs=outputs,
            arguments=arguments,
            constants={name: value for name, value in constants.items() if name not in OPTIONS},
            divisible=tuple(table.get("divisible", ())),
            requires=tuple(translate(text, self.scope, self.where("requires")) for text in requires),
            contiguous=tuple(dict.fromkeys([*derived.get("contiguous", ()), *table.get("contiguous", ())])),
            configs=configs,
            grids=tuple(grids),
        )

    def parameters(self) -> tuple[Parameter, ...]:
        match = re.fullmatch(r"\((.*)\) -> (\(.*\)|Tensor)", self.table["schema"])
        texts = [text.strip() for text in match[1].split(",") if text.strip() not in ("", "*")] if match else []
        found = [_PARAMETER.fullmatch(text) for text in texts]
        results = match[2].count("Tensor") if match else -1
        if match is None or None in found or results != len(self.table["outputs"]):
            bad = next((text for text, part in zip(texts, found, strict=True) if part is None), self.table["schema"])
            raise self.error(
                "schema",
                f"`{bad}` is no schema of an op with {len(self.table['outputs'])} outputs",
                'write for example "(Tensor x, Tensor(a!) out, float scale=1.0, int n) -> Tensor": parameters are '
                "Tensor, int, float or bool, and each of `outputs` is a result",
            )
        parts = [part for part in found if part]
        return tuple(Parameter(p[1], p[3], p[4], bool(p[2]), p[0]) for p in parts)

    def output(self, name: str, text: str) -> Output:
        where = self.where("outputs")
        call = ast.parse(text, mode="eval").body
        match call:
            case ast.Call(func=ast.Name("empty_like" | "zeros_like" as kind), args=[ast.Name(like)], keywords=keywords):
                if self.scope.get(like) != "Tensor":
                    raise self.error("outputs", f"{like} is no tensor of the schema", f"write {kind}(x) of one")
                return Output(name, like, (), self.dtype(keywords, where), kind.startswith("zeros"))
            case ast.Call(func=ast.Name("empty" | "zeros" as kind), args=[ast.Tuple(sizes)], keywords=[_] as keywords):
                each = tuple(translate(ast.unparse(size), self.scope, where) for size in sizes)
                return Output(name, None, each, self.dtype(keywords, where), kind == "zeros")
        raise self.error(
            "outputs",
            f"`{text}` is no allocation",
            "write empty_like(x), or empty((x.size(0), 8), dtype=float32); zeros_like and zeros likewise",
        )

    def dtype(self, keywords: Sequence[ast.keyword], where: str) -> Expression | None:
        if not keywords:
            return None
        found = translate(ast.unparse(keywords[0].value), self.scope, where)
        if len(keywords) > 1 or keywords[0].arg != "dtype" or found.kind != "dtype":
            raise self.error(
                "outputs", f"{ast.unparse(keywords[0])} is no dtype", "write dtype=float32 or dtype=x.dtype"
            )
        return found

    def arguments(self) -> Iterator[Argument]:
        kernel = self.functions[self.table["kernel"]]
        names = [parameter.arg for parameter in kernel.args.args]
        types = self.table.get("types", {})
        for key in ("arguments", "types"):
            for name in self.table.get(key, {}):
                if name not in names:
                    raise self.error(key, f"{name} is no parameter of {kernel.name}", f"it has {', '.join(names)}")
        for name in names:
            if name in self.table["arguments"]:
                value = translate(self.table["arguments"][name], self.scope, self.where("arguments"))
                kind, _, divisor = types.get(name, _DEFAULT_TYPES.get(value.kind, "")).partition(":")
                if "[" in kind:
                    raise self.error("types", f"{name} has sizes, as tensors of CuTe DSL", "remove them")
                if kind.startswith("*") != (value.kind == "Tensor") or not kind:
                    raise self.error(
                        "types", f"{name} is {kind}, and its value is a {value.kind}", "correct one of them"
                    )
                if "T" in kind and not self.table.get("dtypes"):
                    raise self.error("dtypes", f"{name} has the type {kind}, and no dtypes are listed", "list them")
                yield Argument(name, value, kind, bool(divisor))

    def configs(self, scope: Mapping[str, str], constants: Mapping[str, Any]) -> Iterator[Config]:
        """Yield the rows. A row also needs the values that the launch function passes on as they are, such as flags."""
        kernel = self.functions[self.table["kernel"]]
        names = [parameter.arg for parameter in kernel.args.args]
        optional = set(names[len(names) - len(kernel.args.defaults) :])
        for row in self.table.get("config", ({},)):
            values = {name: value for name, value in row.items() if name != "when"}
            options = {**self.options, **{name: constants[name] for name in self.options if name in constants}}
            options |= {name: values.pop(name) for name in self.options if name in values}
            for name in values:
                if name not in (*names, *self.sizes):
                    hint = f"it has {', '.join(names)}; options are {', '.join(('when', *self.options))}"
                    raise self.error("config", f"{name} is neither a parameter of {kernel.name} nor an option", hint)
            known = {*values, *constants, *self.table["arguments"], *self.supplied}
            if missing := [name for name in names if name not in known and name not in optional]:
                raise self.error(
                    "config",
                    f"{', '.join(missing)} of {kernel.name} has no value at build time",
                    "list the values to compile in rows of `config`, or give one in `constants`",
                )
            tests = [f"({row['when']})"] if "when" in row else []
            passed = {name: text for name, text in self.passed.items() if name in values and is_plain(text)}
            tests += [f"{text} == {values[name]}" for name, text in passed.items()]
            when = translate(" and ".join(tests), scope, self.where("config")) if tests else None
            yield Config(when, values, options)

    def where(self, key: str) -> str:
        return f"{self.file}: [op.{self.name}] {key}"

    def error(self, key: str, message: str, hint: str) -> ConfigError:
        return ConfigError(message, where=self.where(key), hint=hint)


def _kind(value: object) -> str:
    return {bool: "bool", int: "int", float: "float"}.get(type(value), "str")
