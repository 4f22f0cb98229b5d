"""Turns the Python expressions of a launch function into those of aot.toml."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any, NoReturn

from kernel_aot.expressions import FUNCTIONS, METHODS
from kernel_aot.syntax import last_name
from kernel_format.errors import ConfigError

ALLOCATIONS = ("empty", "zeros", "empty_like", "zeros_like", "new_empty", "new_zeros")
_SCHEMA_TYPES = {"torch.Tensor": "Tensor", "Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


class LaunchExpressions(ast.NodeTransformer):
    """The names of a launch function, and its expressions with these names replaced by their values.

    Attributes:
        parameters: The function's parameters: name -> type in the schema, default.
        locals: Local name -> its value as an expression of aot.toml.
        tensors: Name of a tensor that the function allocates -> the expression of `outputs`.
        meta: The parameter of the grid that is read, if the grid is a lambda.
    """

    def __init__(self, path: Path, function: ast.FunctionDef) -> None:
        self.path, self.function = path, function
        self.parameters = self._parameters()
        self.locals: dict[str, ast.expr] = {}
        self.tensors: dict[str, str] = {}
        self.meta: str | None = None

    def _parameters(self) -> dict[str, tuple[str, ast.expr | None]]:
        arguments = self.function.args
        if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            self.refuse(self.function, "has parameters *args, **kwargs or positional-only ones")
        defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
        defaults += [*arguments.defaults, *arguments.kw_defaults]
        typed = {}
        for parameter, default in zip([*arguments.args, *arguments.kwonlyargs], defaults, strict=True):
            annotation = parameter.annotation and ast.unparse(parameter.annotation).strip("'\"")
            if annotation not in _SCHEMA_TYPES:
                found = f"has the annotation {annotation}" if annotation else "has no annotation"
                self.refuse(parameter, f"parameter {parameter.arg} {found}; expected torch.Tensor, int, float or bool")
            typed[parameter.arg] = (_SCHEMA_TYPES[annotation], default)
        return typed

    def refuse(self, node: ast.AST, message: str, hint: str = "") -> NoReturn:
        """Raise an error that names the line of a part of the function."""
        line = getattr(node, "lineno", self.function.lineno)
        keys = "write schema, outputs, arguments, grid in"
        hint = hint or f"{keys} [op.{self.function.name}] of aot.toml, or simplify the function"
        raise ConfigError(f"{self.function.name} {message}", where=f"{self.path}:{line}", hint=hint)

    def value(self, node: ast.expr) -> ast.expr:
        """Return an expression of aot.toml."""
        value: ast.expr = self.visit(copy.deepcopy(node))
        return value

    def text(self, node: ast.expr) -> str:
        """Return the text of an expression of aot.toml."""
        return ast.unparse(self.value(node))

    def tensor(self, node: ast.AST, name: str) -> str:
        """Return the name of a parameter after checking that it is a tensor."""
        if self.parameters.get(name, ("",))[0] != "Tensor":
            self.refuse(node, f"uses {name} as a tensor; expected a parameter with the annotation torch.Tensor")
        return name

    def allocation(self, call: ast.Call) -> str:
        """Return the expression of a tensor that the function allocates."""
        kind = last_name(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if unread := set(keywords) - {"dtype", "device"}:
            names = ", ".join(map(str, unread))
            self.refuse(call, f"allocates a tensor with {names}; expected dtype and device alone")
        dtype = self._dtype(keywords["dtype"]) if "dtype" in keywords else None
        if kind.endswith("_like"):
            return self._allocation_like(call, kind, dtype)
        if kind.startswith("new_"):
            assert isinstance(call.func, ast.Attribute)
            kind = kind.removeprefix("new_")
            dtype = dtype or f"{self.tensor(call, ast.unparse(call.func.value))}.dtype"
        if dtype is None:
            self.refuse(call, "allocates a tensor without a dtype; expected dtype=torch.float32 or dtype=x.dtype")
        shape = call.args[0] if len(call.args) == 1 else ast.Tuple(call.args)
        if isinstance(shape, ast.Attribute) and shape.attr == "shape":
            return f"{kind}_like({self.tensor(call, ast.unparse(shape.value))}, dtype={dtype})"
        sizes = shape.elts if isinstance(shape, ast.Tuple | ast.List) else [shape]
        joined = ", ".join(map(self.text, sizes)) + ("," if len(sizes) == 1 else "")
        return f"{kind}(({joined}), dtype={dtype})"

    def _allocation_like(self, call: ast.Call, kind: str, dtype: str | None) -> str:
        source = ast.unparse(call.args[0])
        if source in self.tensors:
            like = self.tensors[source].removeprefix("empty").removeprefix("zeros")
            like = kind.removesuffix("_like") + like
        else:
            like = f"{kind}({self.tensor(call, source)})"
        if dtype is None:
            return like
        before, known, _ = like.rpartition(", dtype=")
        return f"{before if known else like.removesuffix(')')}, dtype={dtype})"

    def _dtype(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name):
                return name
            case ast.Attribute(value=ast.Name(name), attr="dtype"):
                return f"{self.tensor(node, name)}.dtype"
        self.refuse(node, f"has the dtype {ast.unparse(node)}; expected a dtype of torch, or of a parameter")

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(name) if name in self.locals:
                return self.locals[name]
            case ast.Name(name) if name in self.parameters or name in self.tensors:
                return node
            case ast.Constant(value=int() | float()):
                return node
            case ast.Subscript(value=ast.Name(name), slice=ast.Constant(str() as key)) if name == self.meta:
                return ast.Name(key)
            case ast.Subscript(value=ast.Attribute(value=ast.Name() as tensor, attr="shape"), slice=index):
                return ast.Call(ast.Attribute(tensor, "size"), [self.visit(index)], [])
            case ast.Attribute(value=ast.Name() as tensor, attr="ndim"):
                return ast.Call(ast.Attribute(tensor, "dim"), [], [])
            case ast.Attribute(value=ast.Name(name), attr="dtype") if name in self.parameters:
                return node
            case ast.Call(func=ast.Attribute(value=ast.Name(name), attr=method), args=arguments, keywords=[]) if (
                name in {**self.parameters, **self.tensors} and len(arguments) == METHODS.get(method)
            ):
                node.args = [self.visit(argument) for argument in arguments]
                return node
            case ast.Call(func=function, args=arguments, keywords=[]) if last_name(function) in FUNCTIONS:
                return ast.Call(ast.Name(last_name(function)), [self.visit(argument) for argument in arguments], [])
            case ast.BinOp(op=operator) if isinstance(operator, _OPERATORS):
                return self.generic_visit(node)
            case ast.BoolOp() | ast.UnaryOp() | ast.Compare() | ast.IfExp() | ast.operator() | ast.unaryop():
                return self.generic_visit(node)
            case ast.boolop() | ast.cmpop():
                return node
        text = ast.unparse(node)
        if re.search(r"TensorDescriptor|tma_descriptor", text):
            hint = "make the descriptor in the kernel, by tl.make_tensor_descriptor"
            self.refuse(node, "makes a TMA descriptor on the host, which is not supported", hint)
        self.refuse(node, f"has an expression that is not read: `{text.splitlines()[0]}`")
