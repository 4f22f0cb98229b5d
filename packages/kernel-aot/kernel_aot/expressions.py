"""Expressions of aot.toml: a small subset of Python, checked and translated to C++.

Integers are `int64_t`, and `//` and `%` round as in Python. Operands are arguments of the op, names with a value, sizes
and strides of tensors, and numbers.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_format.errors import ConfigError

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", *_INTEGERS)
METHODS = {"size": 1, "stride": 1, "numel": 0, "dim": 0, "element_size": 0}
FUNCTIONS = {"cdiv": 2, "next_power_of_2": 1, "min": 2, "max": 2}
_INFIX: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_CALLED: Mapping[type[ast.operator], str] = {ast.FloorDiv: "floor_div", ast.Mod: "modulo"}
_COMPARED: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


@dataclass(frozen=True)
class Expression:
    """An expression in both languages.

    Attributes:
        python: Its text on one line, which can be part of a string or of code.
        kind: The type of its value: `int`, `float`, `bool`, `Tensor` or `dtype`.
        sides: The sides of a comparison of integers in C++.
    """

    python: str
    cpp: str
    kind: str
    sides: tuple[str, ...] = ()


def translate(text: str | int, scope: Mapping[str, str], where: str, use: str = "") -> Expression:
    """Return an expression.

    Args:
        scope: The names that it may use, and their kinds.
        where: The place in aot.toml, for errors.
        use: `int` for a size, and `bool` for a condition, of which only the truth counts.

    Raises:
        ConfigError: If it is not an expression of the subset, or uses an unknown name.
    """
    tree = parse(text, where)
    translator = _Translator(scope, where)
    if use == "int":
        cpp, kind = translator.integer(tree), use
    else:
        cpp, kind = translator.number(tree, is_condition=True) if use else translator.of(tree)
    sides = []
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        sides = [translator.of(side) for side in (tree.left, tree.comparators[0])]
    shown = tuple(side for side, _ in sides) if all(kind == "int" for _, kind in sides) else ()
    return Expression(" ".join(str(text).split()), cpp[1:-1] if cpp.startswith("(") else cpp, kind, shown)


def parse(text: str | int, where: str) -> ast.expr:
    """Return the syntax tree of an expression of Python, or raise a ConfigError."""
    try:
        if re.search(r"[#'\"\\]", str(text)):
            raise ValueError("it has a quote, a comment or a backslash")
        return ast.parse(str(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{str(text)[:80]!r} is not an expression: {error}", where=where, hint=_HINT) from error


def is_plain(text: str) -> bool:
    """Return whether an expression is an argument or a size, and no choice of the launch function."""
    node = ast.parse(text, mode="eval").body
    return isinstance(node, ast.Name) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))


def _wide(text: str, kind: str) -> str:
    """Return C++ of 64 bits: literals and bools are an `int` of 32 bits there, whose products would overflow."""
    return f"int64_t{{{text}}}" if kind == "bool" or text.strip("-()").isdigit() else text


_HINT = (
    "expressions have arguments of the op, integers, x.size(i), x.stride(i), x.numel(), x.dim(), + - * // %, "
    "comparisons, and, or, not, `a if c else b`, min, max, cdiv and next_power_of_2"
)


class _Translator:
    def __init__(self, scope: Mapping[str, str], where: str) -> None:
        self.scope, self.where = scope, where

    def of(self, node: ast.expr, is_condition: bool = False) -> tuple[str, str]:
        """Return the C++ of an expression, and its kind. Of a condition, only the truth counts."""
        match node:
            case ast.Constant(value=bool(value)):
                return str(value).lower(), "bool"
            case ast.Constant(value=int(value)) if value < 1 << 63:
                return str(value), "int"
            case ast.Constant(value=float(value)) if math.isfinite(value):
                return repr(value), "float"
            case ast.Name(name) if name in self.scope:
                return name, self.scope[name]
            case ast.Name(name) | ast.Attribute(value=ast.Name("torch"), attr=name) if name in DTYPES:
                return f"aot::dtype_{name}()", "dtype"
            case ast.Name(name):
                raise self._refused(f"there is no {name}; expected one of {', '.join(self.scope)}")
            case ast.Attribute(value=ast.Name() as tensor, attr="dtype"):
                return f"aot::dtype({self._tensor(tensor)})", "dtype"
            case ast.Call(func=ast.Attribute(value=ast.Name() as tensor, attr=method), args=args, keywords=[]) if len(
                args
            ) == METHODS.get(method):
                return f"aot::{method}({', '.join([self._tensor(tensor), *map(self.integer, args)])})", "int"
            case ast.Subscript(value=ast.Attribute(value=ast.Name() as tensor, attr="shape"), slice=index):
                return f"aot::size({self._tensor(tensor)}, {self.integer(index)})", "int"
            case ast.Call(func=ast.Name(function), args=args, keywords=[]) if len(args) == FUNCTIONS.get(function):
                return f"aot::{function}({', '.join(map(self.integer, args))})", "int"
            case ast.BinOp(left, operator, right) if type(operator) in _INFIX:
                (a, kind), (b, other) = self.number(left), self.number(right)
                if "float" in (kind, other):
                    return f"({a} {_INFIX[type(operator)]} {b})", "float"
                return f"({_wide(a, kind)} {_INFIX[type(operator)]} {b})", "int"
            case ast.BinOp(left, operator, right) if type(operator) in _CALLED:
                return f"aot::{_CALLED[type(operator)]}({self.integer(left)}, {self.integer(right)})", "int"
            case ast.UnaryOp(ast.USub(), operand):
                text, kind = self.number(operand)
                text, kind = (_wide(text, kind), "int") if kind == "bool" else (text, kind)
                return f"-({text})" if text.startswith("-") else f"-{text}", kind
            case ast.UnaryOp(ast.Not(), operand):
                return f"!{self.number(operand, is_condition=True)[0]}", "bool"
            case ast.BoolOp(operator, values):
                parts = [self.number(value, is_condition) for value in values]
                is_and, kind = isinstance(operator, ast.And), "bool" if is_condition else self._common(node, parts)
                if kind == "bool":
                    return f"({(' && ' if is_and else ' || ').join(part for part, _ in parts)})", kind
                chosen = parts[-1][0]
                for part, _ in reversed(parts[:-1]):  # `a or b` is one of the two numbers
                    chosen = f"({part} ? {chosen} : {part})" if is_and else f"({part} ? {part} : {chosen})"
                return chosen, kind
            case ast.Compare(left, operators, comparators) if all(type(each) in _COMPARED for each in operators):
                found = [self.of(side) for side in (left, *comparators)]
                if any(kind in ("Tensor", "dtype") for _, kind in found):
                    self._common(node, found)
                sides = [text for text, _ in found]
                texts = [
                    f"{sides[number]} {_COMPARED[type(operator)]} {sides[number + 1]}"
                    for number, operator in enumerate(operators)
                ]
                return f"({' && '.join(texts)})", "bool"
            case ast.IfExp(test, body, orelse):
                branches = [self.of(branch, is_condition) for branch in (body, orelse)]
                kind = "bool" if is_condition else self._common(node, branches)
                text = _wide(branches[0][0], kind) if kind == "int" else branches[0][0]
                return f"({self.number(test, is_condition=True)[0]} ? {text} : {branches[1][0]})", kind
        raise self._refused(f"`{ast.unparse(node)}` is not part of an expression")

    def integer(self, node: ast.expr) -> str:
        """Return the C++ of an integer."""
        text, kind = self.of(node)
        if kind != "int":
            raise self._refused(f"`{ast.unparse(node)}` is a {kind}; expected an integer")
        return text

    def number(self, node: ast.expr, is_condition: bool = False) -> tuple[str, str]:
        """Return the C++ of a number or bool, and its kind."""
        text, kind = self.of(node, is_condition)
        if kind not in ("int", "float", "bool"):
            raise self._refused(f"`{ast.unparse(node)}` is a {kind}; expected a number")
        return text, kind

    def _common(self, node: ast.expr, parts: Sequence[tuple[str, str]]) -> str:
        """Return the kind of all parts of an expression: C++ would convert different kinds, and Python does not."""
        kinds = list(dict.fromkeys(kind for _, kind in parts))
        if kinds[1:] or kinds == ["Tensor"]:
            hint = "write values of one kind: `1.0` for a float, and `n != 0` for a bool"
            message = f"`{ast.unparse(node)}` has values of the kinds {' and '.join(kinds)}"
            raise ConfigError(message, where=self.where, hint=hint)
        return kinds[0]

    def _tensor(self, node: ast.Name) -> str:
        if self.scope.get(node.id) != "Tensor":
            tensors = [name for name, kind in self.scope.items() if kind == "Tensor"]
            raise self._refused(f"{node.id} is not a tensor; expected one of {', '.join(tensors)}")
        return node.id

    def _refused(self, message: str) -> ConfigError:
        return ConfigError(message, where=self.where, hint=_HINT)
