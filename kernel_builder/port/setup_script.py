"""Reads a `setup.py` without running it: follows its assignments, branches and functions as far as they are known.

What depends on the machine is decided as for Linux with or without CUDA, without environment variables and options.
Values that cannot be known stay `Unknown`, with their line, and so does all that is computed from them.

Running the script in the sandbox with a `cpp_extension` that records its arguments would be shorter, and would tell
less: one machine's branch of each condition, no line of a value, and nothing where a package that the script imports,
a compiler that it asks for or the network is missing.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_builder.port import setup_calls, setup_conditions
from kernel_builder.port.setup_calls import Unknown
from kernel_format.errors import ConfigError

CONSTRUCTORS = {"CUDAExtension": "cuda", "CppExtension": "cpu", "SyclExtension": "xpu"}
_MOST_DEPTH = 12
_MOST_STEPS = 100_000


@dataclass(frozen=True)
class Remark:
    """Something that a person has to know: a line of `setup.py`, or of a source."""

    line: int
    text: str


@dataclass(frozen=True)
class ExtensionCall:
    """A call of `CUDAExtension` or `CppExtension`."""

    backend: str
    line: int
    arguments: Mapping[str, Any]


@dataclass
class SetupScript:
    """What a `setup.py` declares.

    Attributes:
        settings: The arguments of `setup(...)`.
        extensions: The extensions, in the order of their calls.
        assumed: Conditions that were decided without knowing them.
        unknown: Lines of which nothing was understood.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    extensions: list[ExtensionCall] = field(default_factory=list)
    assumed: list[Remark] = field(default_factory=list)
    unknown: list[Remark] = field(default_factory=list)


def read_setup(path: Path, *, cuda: bool) -> SetupScript:
    """Read a `setup.py` as on a Linux machine with or without CUDA.

    Raises:
        ConfigError: If the file is missing or is not Python.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"is not Python: {error}", where=str(path), hint="name the setup.py of a torch.utils.cpp_extension project"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError("there is no such file", where=str(path), hint="name a setup.py") from error
    reader = _Reader(path, cuda)
    try:
        reader.execute(tree.body, reader.globals)
    except RecursionError as error:
        raise ConfigError(
            "is nested too deeply", where=str(path), hint="write build.toml by hand: docs/port.md"
        ) from error
    return reader.script


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Loop(Exception):
    """`break` or `continue`."""


@dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef


@dataclass(frozen=True)
class _Constructor:
    backend: str


class _Reader:
    """Executes statements on known values; `Unknown` stands for all others."""

    def __init__(self, path: Path, cuda: bool) -> None:
        self.script = SetupScript()
        self.facts = setup_calls.facts(path, cuda)
        self.calls = setup_calls.SetupCalls(path.resolve().parent)
        self.globals: dict[str, Any] = {"__file__": str(path.resolve()), "__name__": "__main__"}
        self._depth = self._steps = 0

    def execute(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        for statement in body:
            self._steps += 1
            if self._steps > _MOST_STEPS:
                return
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        match node:
            case ast.FunctionDef():
                names[node.name] = _Function(node)
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self._assign(target, value, names)
            case ast.AnnAssign(value=ast.expr() as given):
                self._assign(node.target, self.value(given, names), names)
            case ast.AugAssign():
                self._extend(node, names)
            case ast.Expr():
                self.value(node.value, names)
            case ast.If():
                taken = self._decide(node, names)
                self.execute(node.body if taken else node.orelse, names)
            case ast.For():
                self._loop(node, names)
            case ast.With():
                self.execute(node.body, names)
            case ast.Try():
                self.execute([*node.body, *node.orelse, *node.finalbody], names)
            case ast.Return():
                raise _Return(None if node.value is None else self.value(node.value, names))
            case ast.Break() | ast.Continue():
                raise _Loop
            case _:
                pass

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Tuple() | ast.List():
                known = isinstance(value, (list, tuple)) and len(value) == len(target.elts)
                values = value if known else [self._unknown(target)] * len(target.elts)
                for element, part in zip(target.elts, values, strict=True):
                    self._assign(element, part, names)
            case ast.Subscript():
                holder, key = self.value(target.value, names), self.value(target.slice, names)
                if isinstance(holder, dict) and isinstance(key, str):
                    holder[key] = value

    def _extend(self, node: ast.AugAssign, names: dict[str, Any]) -> None:
        before = self.value(_as_load(node.target), names)
        after = self.value(node.value, names)
        if isinstance(before, list) and isinstance(node.op, ast.Add):
            before.extend(after if isinstance(after, (list, tuple)) else [after])  # other names of the list see it
            return
        self._assign(node.target, self.calls.operation(node.op, before, after, self._unknown(node)), names)

    def _loop(self, node: ast.For, names: dict[str, Any]) -> None:
        values = self.value(node.iter, names)
        if not isinstance(values, (list, tuple, dict, set)):
            if self._declares(node.body):
                self.script.unknown.append(Remark(node.lineno, f"a loop over {ast.unparse(node.iter)}"))
            return
        for value in list(values):
            self._assign(node.target, value, names)
            try:
                self.execute(node.body, names)
            except _Loop:
                continue  # `break` and `continue` alike: more is found, rather than less

    def _decide(self, node: ast.If, names: dict[str, Any]) -> bool:
        """Return whether the body of an `if` counts, and not its `else`."""
        value = self.value(node.test, names)
        if isinstance(value, Unknown):
            taken = not setup_conditions.asks_for_special(node.test) and not setup_conditions.only_stops(node.body)
            if self._declares(node.orelse) and not self._declares(node.body):
                taken = False
            if setup_conditions.asks_for_other_machines(node.test):
                taken = False
        else:
            taken = bool(value)
        # Of several conditions, those that are known do not say what the others are about.
        several = isinstance(node.test, ast.BoolOp) and isinstance(value, Unknown)
        words = value.text if several else ast.unparse(node.test)
        elsewhere = setup_conditions.names_other_machines(words)
        if not taken and not elsewhere and self._declares(node.body) and not self._declares(node.orelse):
            # An extension that has to be asked for, by an option or an environment variable.
            asks_for_cuda = "cuda" in words.lower() and not self.facts["torch.cuda.is_available"]
            taken = not asks_for_cuda
            value = Unknown(node.lineno, words)
        if isinstance(value, Unknown) and not elsewhere and not setup_conditions.only_stops(node.body):
            self.script.assumed.append(Remark(node.lineno, f"`{ast.unparse(node.test)}` is taken as {taken}"))
        return taken

    def _declares(self, body: Sequence[ast.stmt]) -> bool:
        return any(
            isinstance(node, (ast.Name, ast.Attribute)) and _last_name(node) in CONSTRUCTORS
            for statement in body
            for node in ast.walk(statement)
        )

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return the value of an expression, or `Unknown`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return self._named(node, names)
            case ast.List() | ast.Tuple() | ast.Set():
                return list(self._elements(node.elts, names))
            case ast.Dict():
                return self._dictionary(node, names)
            case ast.JoinedStr():
                parts = [self.value(part, names) for part in node.values]
                return "".join(map(str, parts)) if not any(map(_is_unknown, parts)) else self._unknown(node)
            case ast.FormattedValue():
                return self.value(node.value, names)
            case ast.BinOp():
                left, right = self.value(node.left, names), self.value(node.right, names)
                return self.calls.operation(node.op, left, right, self._unknown(node))
            case ast.IfExp():
                test = self.value(node.test, names)
                taken = not setup_conditions.asks_for_special(node.test) if isinstance(test, Unknown) else bool(test)
                return self.value(node.body if taken else node.orelse, names)
            case ast.BoolOp() | ast.UnaryOp() | ast.Compare():
                return self._truth(node, names)
            case ast.Subscript():
                return self._item(node, names)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._comprehension(node, names)
            case ast.Call():
                return self._call(node, names)
            case ast.Starred():
                return self.value(node.value, names)
        return self._unknown(node)

    def _named(self, node: ast.Name | ast.Attribute, names: dict[str, Any]) -> Any:
        if isinstance(node, ast.Name):
            for scope in (names, self.globals):
                if node.id in scope:
                    return scope[node.id]
        dotted = ast.unparse(node)
        if dotted in self.facts:
            return self.facts[dotted]
        if _last_name(node) in CONSTRUCTORS:
            return _Constructor(CONSTRUCTORS[_last_name(node)])
        if isinstance(node, ast.Attribute):
            return self.calls.attribute(self.value(node.value, names), node.attr, self._unknown(node))
        return self._unknown(node)

    def _elements(self, nodes: Sequence[ast.expr], names: dict[str, Any]) -> Iterator[Any]:
        for node in nodes:
            value = self.value(node, names)
            if isinstance(node, ast.Starred) and isinstance(value, (list, tuple)):
                yield from value
            else:
                yield value

    def _dictionary(self, node: ast.Dict, names: dict[str, Any]) -> dict[Any, Any]:
        read: dict[Any, Any] = {}
        for key, given in zip(node.keys, node.values, strict=True):
            value = self.value(given, names)
            if key is None:
                read |= value if isinstance(value, dict) else {}
            elif isinstance(name := self.value(key, names), str):
                read[name] = value
        return read

    def _truth(self, node: ast.BoolOp | ast.UnaryOp | ast.Compare, names: dict[str, Any]) -> Any:
        if isinstance(node, ast.UnaryOp):
            value = self.value(node.operand, names)
            if isinstance(node.op, ast.USub) and isinstance(value, int):
                return -value
            return not value if isinstance(node.op, ast.Not) and not _is_unknown(value) else self._unknown(node)
        if isinstance(node, ast.Compare):
            values = [self.value(operand, names) for operand in (node.left, *node.comparators)]
            return self.calls.comparison(node.ops, values, self._unknown(node))
        decisive = isinstance(node.op, ast.Or)  # a value that decides, whatever the others are
        values = [self.value(operand, names) for operand in node.values]
        for value in values:
            if not _is_unknown(value) and bool(value) is decisive:
                return value
        unknown = [operand for operand, value in zip(node.values, values, strict=True) if _is_unknown(value)]
        return Unknown(node.lineno, " and ".join(map(ast.unparse, unknown))) if unknown else values[-1]

    def _item(self, node: ast.Subscript, names: dict[str, Any]) -> Any:
        holder = self.value(node.value, names)
        key: Any
        if isinstance(node.slice, ast.Slice):
            bounds = (node.slice.lower, node.slice.upper, node.slice.step)
            key = slice(*[None if bound is None else self.value(bound, names) for bound in bounds])
        else:
            key = self.value(node.slice, names)
        try:
            return holder[key] if isinstance(holder, (str, list, dict)) else self._unknown(node)
        except (KeyError, IndexError, TypeError):
            return self._unknown(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, names: dict[str, Any]) -> Any:
        scopes = [dict(names)]
        for generator in node.generators:
            inner = []
            for scope in scopes:
                values = self.value(generator.iter, scope)
                if not isinstance(values, (list, tuple, dict, set)):
                    return self._unknown(node)
                for value in values:
                    nested = dict(scope)
                    self._assign(generator.target, value, nested)
                    if all(self.value(test, nested) for test in generator.ifs):
                        inner.append(nested)
            scopes = inner
        return [self.value(node.elt, scope) for scope in scopes]

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        arguments = list(self._elements(node.args, names))
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, names)
            keywords |= {keyword.arg: value} if keyword.arg else value if isinstance(value, dict) else {}
        function = self.value(node.func, names)
        if isinstance(function, _Constructor):
            given = {**dict(zip(("name", "sources"), arguments, strict=False)), **keywords}
            # Lists may be extended after the call, for the next extension.
            self.script.extensions.append(ExtensionCall(function.backend, node.lineno, copy.deepcopy(given)))
            return self._unknown(node)
        if isinstance(function, _Function):
            return self._inlined(function.node, arguments, keywords, self._unknown(node))
        if isinstance(function, bool):
            return function  # a fact, such as `torch.cuda.is_available()`
        if isinstance(node.func, (ast.Name, ast.Attribute)) and _last_name(node.func) == "setup":
            self.script.settings = keywords
        owner = self.value(node.func.value, names) if isinstance(node.func, ast.Attribute) else None
        return self.calls.call(ast.unparse(node.func), owner, arguments, keywords, self._unknown(node))

    def _inlined(self, node: ast.FunctionDef, arguments: list[Any], keywords: dict[str, Any], unknown: Unknown) -> Any:
        if self._depth >= _MOST_DEPTH:
            return unknown
        parameters = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
        defaults = node.args.defaults
        given = {name: self.value(default, {}) for name, default in zip(parameters[::-1], defaults[::-1], strict=False)}
        given |= {
            parameter.arg: self.value(default, {})
            for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default
        }
        given |= {**dict(zip(parameters, arguments, strict=False)), **keywords}
        self._depth += 1
        try:
            self.execute(node.body, dict.fromkeys(parameters, unknown) | given)
        except _Return as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _unknown(self, node: ast.AST) -> Unknown:
        return Unknown(getattr(node, "lineno", 0), ast.unparse(node))


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Unknown)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _as_load(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
