"""Expressions of aot.toml: a small subset of Python, checked and translated to C++.

Integers are `int64_t`, and `//` and `%` round as in Python. Operands are arguments of the op, names with a value, sizes
and strides of tensors, and numbers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kernel_format.errors import ConfigError

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", *_INTEGERS)
_METHODS = {"size": 1, "stride": 1, "numel": 0, "dim": 0, "element_size": 0}
_FUNCTIONS = {"cdiv": 2, "next_power_of_2": 1, "min": 2, "max": 2}
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


def translate(text: str | int, scope: Mapping[str, str], where: str) -> Expression:
    """Return an expression.

    Args:
        scope: The names that it may use, and their kinds.
        where: The place in aot.toml, for errors.

    Raises:
        ConfigError: If it is not an expression of the subset, or uses an unknown name.
    """
    tree = parse(text, where)
    translator = _Translator(scope, where)
    cpp, kind = translator.of(tree)
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


_HINT = (
    "expressions have arguments of the op, integers, x.size(i), x.stride(i), x.numel(), x.dim(), + - * // %, "
    "comparisons, and, or, not, `a if c else b`, min, max, cdiv and next_power_of_2"
)


class _Translator:
    def __init__(self, scope: Mapping[str, str], where: str) -> None:
        self.scope, self.where = scope, where

    def of(self, node: ast.expr) -> tuple[str, str]:
        """Return the C++ of an expression, and its kind."""
        match node:
            case ast.Constant(value=bool(value)):
                return str(value).lower(), "bool"
            case ast.Constant(value=int(value)):
                return str(value), "int"
            case ast.Constant(value=float(value)):
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
            ) == _METHODS.get(method):
                return f"aot::{method}({', '.join([self._tensor(tensor), *map(self._integer, args)])})", "int"
            case ast.Subscript(value=ast.Attribute(value=ast.Name() as tensor, attr="shape"), slice=index):
                return f"aot::size({self._tensor(tensor)}, {self._integer(index)})", "int"
            case ast.Call(func=ast.Name(function), args=args, keywords=[]) if len(args) == _FUNCTIONS.get(function):
                return f"aot::{function}({', '.join(map(self._integer, args))})", "int"
            case ast.BinOp(left, operator, right) if type(operator) in _INFIX:
                (a, kind), (b, other) = self._number(left), self._number(right)
                return f"({a} {_INFIX[type(operator)]} {b})", "float" if "float" in (kind, other) else "int"
            case ast.BinOp(left, operator, right) if type(operator) in _CALLED:
                return f"aot::{_CALLED[type(operator)]}({self._integer(left)}, {self._integer(right)})", "int"
            case ast.UnaryOp(ast.USub(), operand):
                text, kind = self._number(operand)
                return f"-{text}", kind
            case ast.UnaryOp(ast.Not(), operand):
                return f"!{self.of(operand)[0]}", "bool"
            case ast.BoolOp(operator, values):
                joined = " && " if isinstance(operator, ast.And) else " || "
                return f"({joined.join(self.of(value)[0] for value in values)})", "bool"
            case ast.Compare(left, operators, comparators) if all(type(each) in _COMPARED for each in operators):
                sides = [self.of(side)[0] for side in (left, *comparators)]
                texts = [
                    f"{sides[number]} {_COMPARED[type(operator)]} {sides[number + 1]}"
                    for number, operator in enumerate(operators)
                ]
                return f"({' && '.join(texts)})", "bool"
            case ast.IfExp(test, body, orelse):
                (chosen, kind), (other, _) = self.of(body), self.of(orelse)
                return f"({self.of(test)[0]} ? {chosen} : {other})", kind
        raise self._refused(f"`{ast.unparse(node)}` is not part of an expression")

    def _number(self, node: ast.expr) -> tuple[str, str]:
        text, kind = self.of(node)
        if kind not in ("int", "float", "bool"):
            raise self._refused(f"`{ast.unparse(node)}` is a {kind}; expected a number")
        return text, kind

    def _integer(self, node: ast.expr) -> str:
        text, kind = self._number(node)
        if kind == "float":
            raise self._refused(f"`{ast.unparse(node)}` is a float; expected an integer")
        return text

    def _tensor(self, node: ast.Name) -> str:
        if self.scope.get(node.id) != "Tensor":
            tensors = [name for name, kind in self.scope.items() if kind == "Tensor"]
            raise self._refused(f"{node.id} is not a tensor; expected one of {', '.join(tensors)}")
        return node.id

    def _refused(self, message: str) -> ConfigError:
        return ConfigError(message, where=self.where, hint=_HINT)
