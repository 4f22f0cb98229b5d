"""Reads the tables of ops in aot.toml. Keys that a table leaves out are read from the op's launch function."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_aot.expressions import Expression, is_plain, parse, translate
from kernel_aot.launch_function import KEYS, read_launch_function
from kernel_aot.ops import Argument, Config, Op, Output, Parameter
from kernel_aot.syntax import last_name
from kernel_format.errors import ConfigError

OPTIONS = {"num_warps": 4, "num_stages": 3}
_DEFAULT_TYPES = {"Tensor": "*T", "int": "i32", "float": "fp32", "bool": "u1"}
_KINDS = {bool: "bool", int: "int", float: "float"}
_PARAMETER = re.compile(r"(Tensor|int|float|bool)(\(\w!\))? (\w+)(?:=(True|False|-?\d[\de.+-]*))?", re.ASCII)
_RESULTS = re.compile(r"\(\)|\(?Tensor(\(\w!\))?(, Tensor(\(\w!\))?)*\)?", re.ASCII)
# Words of C++ that are none of Python, and could be names there.
_RESERVED = {
    "alignas", "alignof", "asm", "auto", "bool", "case", "catch", "char", "const", "constexpr", "consteval",
    "constinit", "const_cast", "decltype", "default", "delete", "do", "double", "dynamic_cast", "enum", "explicit",
    "export", "extern", "false", "float", "friend", "goto", "inline", "int", "long", "mutable", "namespace", "new",
    "noexcept", "nullptr", "operator", "private", "protected", "public", "register", "reinterpret_cast", "requires",
    "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct", "switch", "template", "this",
    "thread_local", "throw", "true", "typedef", "typeid", "typename", "union", "unsigned", "using", "virtual", "void",
    "volatile", "wchar_t", "bitand", "bitor", "compl", "xor",
}  # fmt: skip


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
        self, file: Path, source: Path, functions: Mapping[str, ast.FunctionDef], name: str, table: Mapping[str, Any]
    ) -> None:
        self.file, self.source, self.name, self.table = file, source, name, dict(table)
        self.passed: dict[str, str] = {}
        self.scope: dict[str, str] = {}  # the names that expressions may use, and their kinds
        if table["kernel"] not in functions:
            known = ", ".join(name for name, node in functions.items() if node.decorator_list)
            raise self.error("kernel", f"{source.name} has no function {table['kernel']}", f"it has {known}")
        self.kernel = functions[table["kernel"]]
        self.names = [parameter.arg for parameter in self.kernel.args.args]

    def read(self) -> Op:
        table = self.table
        self.check_names("kernel", [self.name])
        derived = read_launch_function(self.source, self.name, table)
        table |= {key: derived[key] for key in KEYS if key not in table}
        self.passed |= derived.get("passed", {})
        parameters = self.parameters()
        self.scope |= {parameter.name: parameter.kind for parameter in parameters}
        outputs = tuple(self.output(name, text) for name, text in table["outputs"].items())
        self.scope |= dict.fromkeys(table["outputs"], "Tensor")
        arguments = tuple(self.arguments())
        numbers = {argument.name: argument.value for argument in arguments if not argument.is_tensor}
        values = {name: value.kind for name, value in numbers.items()}
        given = {**derived.get("constants", {}), **derived.get("passed", {})}
        for name, value in (given | {name: value.python for name, value in numbers.items()}).items():
            if name in self.scope and value != name:
                message = f"{name} of {table['kernel']} is `{value}`, and {name} of {self.name} is another value"
                raise self.error("arguments", message, "rename one of the two parameters")
        scope = {**values, **self.scope}
        constants = {**derived.get("constants", {}), **table.get("constants", {})}
        self.check_names("schema", [parameter.name for parameter in parameters])
        self.check_names("outputs", table["outputs"])
        self.check_names("arguments", [argument.name for argument in arguments])
        self.check_names("constants", constants)
        for name in table.get("contiguous", ()):
            if self.scope.get(name) != "Tensor":
                raise self.error("contiguous", f"{name} is not a tensor of the schema", "name its tensors")
        configs = tuple(self.configs(scope, constants))
        if not table.get("dtypes") and any("tl.T" in {**constants, **row.constants}.values() for row in configs):
            raise self.error("dtypes", "a constexpr is tl.T, and no dtypes are listed", "list them")
        for name in table.get("divisible", ()):
            if name not in {argument.name for argument in arguments}:
                raise self.error("divisible", f"{name} is not an argument of {table['kernel']}", "name its parameters")
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
            requires=tuple(
                translate(text, self.scope, self.where("requires"), "bool")
                for text in [*derived.get("requires", ()), *table.get("requires", ())]
            ),
            contiguous=tuple(dict.fromkeys([*derived.get("contiguous", ()), *table.get("contiguous", ())])),
            configs=configs,
            grids=tuple(self.grid(scope, {**constants, **config.constants}) for config in configs),
            prefer_shared=table.get("prefer_shared", False),
        )

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters of the schema."""
        match = re.fullmatch(r"\((.*)\) -> (.*)", self.table["schema"])
        texts = [text.strip() for text in match[1].split(",") if text.strip() not in ("", "*")] if match else []
        found = [_PARAMETER.fullmatch(text) for text in texts]
        bad = [text for text, part in zip(texts, found, strict=True) if part is None]
        results = _RESULTS.fullmatch(match[2]) if match else None
        if bad or results is None or results[0].count("Tensor") != len(self.table["outputs"]):
            raise self.error(
                "schema",
                f"`{[*bad, self.table['schema']][0]}` is not a schema of {len(self.table['outputs'])} outputs",
                'write for example "(Tensor x, Tensor(a!) out, float scale=1.0, int n) -> Tensor": parameters are '
                "Tensor, int, float or bool, and each of `outputs` is a result",
            )
        return tuple(Parameter(p[1], p[3], p[4], bool(p[2])) for p in found if p)

    def output(self, name: str, text: str) -> Output:
        where = self.where("outputs")
        match parse(text, where):
            case ast.Call(func=ast.Name("empty_like" | "zeros_like" as kind), args=[ast.Name(like)], keywords=keywords):
                if self.scope.get(like) != "Tensor":
                    raise self.error("outputs", f"{like} is not a tensor of the schema", f"write {kind}(x) of one")
                return Output(name, like, (), self.dtype(keywords), kind == "zeros_like")
            case ast.Call(func=ast.Name("empty" | "zeros" as kind), args=[ast.Tuple(sizes)], keywords=[_] as keywords):
                each = tuple(translate(ast.unparse(size), self.scope, where, "int") for size in sizes)
                return Output(name, None, each, self.dtype(keywords), kind == "zeros")
        hint = "write empty_like(x), or empty((x.size(0), 8), dtype=float32); zeros_like and zeros likewise"
        raise self.error("outputs", f"`{text}` is not an allocation", hint)

    def dtype(self, keywords: Sequence[ast.keyword]) -> Expression | None:
        if not keywords:
            return None
        found = translate(ast.unparse(keywords[0].value), self.scope, self.where("outputs"))
        if len(keywords) > 1 or keywords[0].arg != "dtype" or found.kind != "dtype":
            hint = "write dtype=float32 or dtype=x.dtype"
            raise self.error("outputs", f"{ast.unparse(keywords[0])} is not a dtype", hint)
        return found

    def arguments(self) -> Iterator[Argument]:
        """Yield the arguments of the kernel."""
        names, types = self.names, self.table.get("types", {})
        for key in ("arguments", "types"):
            for name in self.table.get(key, {}):
                if name not in names:
                    raise self.error(key, f"{self.kernel.name} has no parameter {name}", f"it has {', '.join(names)}")
        for name in names:
            if name not in self.table["arguments"]:
                continue
            value = translate(self.table["arguments"][name], self.scope, self.where("arguments"))
            kind, _, divisor = types.get(name, _DEFAULT_TYPES.get(value.kind, "")).partition(":")
            if "[" in kind:
                raise self.error("types", f"{name} has sizes, as tensors of CuTe DSL", "remove them")
            is_cut = value.kind == "float" and kind[:2] != "fp"
            if kind.startswith("*") != (value.kind == "Tensor") or not kind or is_cut:
                raise self.error("types", f"{name} is {kind}, and its value is a {value.kind}", "correct one of them")
            if "T" in kind and not self.table.get("dtypes"):
                raise self.error("dtypes", f"{name} has the type {kind}, and no dtypes are listed", "list them")
            yield Argument(name, value, kind, bool(divisor))

    def configs(self, scope: Mapping[str, str], constants: Mapping[str, Any]) -> Iterator[Config]:
        """Yield the rows. A row also needs the launch function's values, except computed numbers if it has `when`."""
        names, kernel = self.names, self.kernel
        optional = set(names[len(names) - len(kernel.args.defaults) :])
        for row in self.table.get("config", ({},)):
            values = {name: value for name, value in row.items() if name not in ("when", *self.options)}
            options = {name: row.get(name, constants.get(name, default)) for name, default in self.options.items()}
            for name in values:
                if name not in (*names, *self.sizes):
                    hint = f"it has {', '.join(names)}; options are {', '.join(('when', *self.options))}"
                    raise self.error("config", f"{name} is neither a parameter of {kernel.name} nor an option", hint)
            known = {*values, *constants, *self.table["arguments"], *self.supplied, *optional}
            if missing := [name for name in names if name not in known]:
                hint = "list the values to compile in rows of `config`, or give one in `constants`"
                message = f"{', '.join(missing)} of {kernel.name} has no value at build time"
                raise self.error("config", message, hint)
            if "when" not in row and (computed := self.heuristics() & values.keys()):
                hint = "write in `when` which calls have this value"
                raise self.error("config", f"{min(computed)} has a value of the kernel's heuristics", hint)
            tests = [f"({row['when']})"] if "when" in row else []
            for name, text in self.passed.items():
                if name in values and ("when" not in row or isinstance(values[name], bool) or is_plain(text)):
                    tests.append(ast.unparse(parse(f"({text}) == {values[name]}", self.where("config"))))
            when = translate(" and ".join(tests), scope, self.where("config"), "bool") if tests else None
            yield Config(when, values, options)

    def heuristics(self) -> set[str]:
        """Return the constexprs that a decorator of the kernel computes for each call."""
        calls = [node for node in self.kernel.decorator_list if isinstance(node, ast.Call)]
        tables = [node for call in calls if last_name(call.func) == "heuristics" for node in ast.walk(call)]
        keys = [key for node in tables if isinstance(node, ast.Dict) for key in node.keys]
        return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}

    def grid(self, scope: Mapping[str, str], compiled: Mapping[str, Any]) -> tuple[Expression, ...]:
        kinds = {name: _KINDS.get(type(value), "str") for name, value in compiled.items()}
        return tuple(translate(size, {**scope, **kinds}, self.where("grid"), "int") for size in self.table["grid"])

    def check_names(self, key: str, names: Iterable[str]) -> None:
        """Refuse a name that is none in both C++ and Python, which the generated files would take as code."""
        for name in names:
            if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name in _RESERVED:
                hint = "use a name of letters, digits and _ that has no meaning in C++ and Python"
                raise self.error(key, f"{name!r} cannot be a name in the generated code", hint)

    def where(self, key: str) -> str:
        return f"{self.file}: [op.{self.name}] {key}"

    def error(self, key: str, message: str, hint: str) -> ConfigError:
        return ConfigError(message, where=self.where(key), hint=hint)
