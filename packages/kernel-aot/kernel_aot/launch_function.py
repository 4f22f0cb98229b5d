"""Reads an op's keys of aot.toml from the source of its launch function.

A simple launch function checks its arguments, allocates the outputs, computes sizes, launches one kernel and returns
the outputs. It is read and never executed. Any other construct raises an error, and the author writes the keys instead.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kernel_aot.stores import last_name, stored_parameters
from kernel_format.errors import ConfigError

KEYS = ("schema", "outputs", "arguments", "grid", "constants")
_SCHEMA_TYPES = {"torch.Tensor": "Tensor", "Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool"}
_METHODS = {"size": 1, "stride": 1, "numel": 0, "nelement": 0, "dim": 0, "element_size": 0}
_FUNCTIONS = ("cdiv", "max", "min", "next_power_of_2")
_ALLOCATIONS = ("empty", "zeros", "empty_like", "zeros_like", "new_empty", "new_zeros")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages")


def read(path: Path, function: str) -> dict[str, Any]:
    """Return the keys of an op's table that its launch function determines.

    Args:
        path: The module with the launch function and its kernel.
        function: The name of the launch function, which is the op's.

    Returns:
        `schema`, `outputs`, `arguments`, `grid` and `constants` as in aot.toml; `requires` and `contiguous` from the
        function's assertions; and `passed`, the other constexprs: name -> expression.

    Raises:
        ConfigError: If the function is missing, or has a construct that this module does not read.
    """
    return _Reader(path, function).read()


class _Reader(ast.NodeTransformer):
    """Reads one launch function; as a transformer, it turns a Python expression into one of aot.toml."""

    def __init__(self, path: Path, function: str) -> None:
        self.path = path
        try:
            module = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except SyntaxError as error:
            raise ConfigError(f"is not Python: {error.msg}", where=f"{path}:{error.lineno}") from error
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        if function not in self.functions:
            raise ConfigError(
                f"has no function {function}, which aot.toml names",
                where=str(path),
                hint=f"define it at the top level, or name the table after one of {', '.join(self.functions)}",
            )
        self.function = self.functions[function]
        self.parameters = self._parameters()
        self.locals: dict[str, ast.expr] = {}
        self.tensors: dict[str, str] = {}  # allocated outputs: name -> expression
        self.grids: dict[str, ast.expr] = {}
        self.meta: str | None = None  # the parameter of the grid that is read
        self.launch: ast.Call | None = None
        self.requires: list[str] = []
        self.contiguous: list[str] = []
        self.returned: list[str] = []

    # --- statements ---------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        for statement in self._statements(self.function.body):
            self._read_statement(statement)
        if self.launch is None:
            self._refuse(self.function, "launches no kernel: expected one `kernel[grid](...)`")
        kernel, values = self._kernel_arguments(self.launch)
        arguments, constants, passed = self._by_kind(kernel, values)
        for name in self.tensors:
            if name not in self.returned:
                self._refuse(self.function, f"allocates {name}, and does not return it")
        grid = self._grid(self.launch)
        return {
            "schema": self._schema(kernel, arguments),
            "outputs": {name: self.tensors[name] for name in self.returned},
            "arguments": arguments,
            "grid": grid,
            "constants": constants,
            "requires": self.requires,
            "contiguous": self.contiguous,
            "passed": passed,
        }

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            if isinstance(statement, ast.With) and all(
                ast.unparse(item.context_expr).startswith(("torch.cuda.device(", "torch.device(", "torch.no_grad("))
                for item in statement.items
            ):
                yield from self._statements(statement.body)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                yield statement

    def _read_statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assert(test=test):
                self._require(test)
            case ast.If(test=test, body=[ast.Raise()], orelse=[]):
                self._require(ast.UnaryOp(ast.Not(), test))
            case ast.Assign(targets=[ast.Name(name)], value=ast.Lambda() as value):
                self.grids[name] = value
            case ast.Assign(targets=[ast.Name(name)], value=value):
                self._assign(name, value)
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)],
                value=ast.Attribute(value=tensor, attr="shape")
                | ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[]),
            ):
                self._require(_expression(f"{ast.unparse(tensor)}.dim() == {len(targets)}"))
                for index, target in enumerate(targets):
                    self._assign_element(target, _expression(f"{ast.unparse(tensor)}.size({index})"))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(
                values
            ):
                for target, element in zip(targets, values, strict=True):
                    self._assign_element(target, element)
            case ast.FunctionDef(name=name, args=args, body=[ast.Return(value=ast.expr() as value)]):
                self.grids[name] = ast.Lambda(args, value)
            case ast.Expr(value=ast.Call(func=ast.Subscript()) as call):
                if self.launch is not None:
                    self._refuse(statement, "launches a second kernel; expected one launch for an op")
                self.launch = call
            case ast.Return(value=value):
                names = value.elts if isinstance(value, ast.Tuple) else [value] if value is not None else []
                self.returned = [ast.unparse(name) for name in names]
                for name in self.returned:
                    if name not in self.tensors:
                        self._refuse(statement, f"returns {name}, which is not a tensor that the function allocates")
            case _:
                self._refuse(statement, f"has a statement that is not read: `{_first_line(statement)}`")

    def _assign_element(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            self._refuse(target, f"assigns to {ast.unparse(target)}; expected a name")
        self._assign(target.id, value)

    def _assign(self, name: str, value: ast.expr) -> None:
        if name in self.parameters:
            self._refuse(value, f"assigns to its parameter {name}")
        if isinstance(value, ast.Call) and last_name(value.func) in _ALLOCATIONS:
            self.tensors[name] = self._allocation(value)
        elif name != "_":
            self.locals[name] = self.visit(copy.deepcopy(value))

    def _require(self, test: ast.expr) -> None:
        match test:
            case ast.BoolOp(op=ast.And(), values=values):
                for value in values:
                    self._require(value)
            case ast.Compare(left=left, ops=[first, second, *more], comparators=[middle, *rest]):
                self._require(ast.Compare(left, [first], [middle]))
                self._require(ast.Compare(middle, [second, *more], rest))
            case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=operand)):
                self._require(operand)
            case ast.UnaryOp(op=ast.Not(), operand=ast.BoolOp(op=ast.Or(), values=values)):
                for value in values:
                    self._require(ast.UnaryOp(ast.Not(), value))
            case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(left=left, ops=[operator], comparators=[right])) if (
                type(operator) in _OPPOSITES
            ):
                self._require(ast.Compare(left, [_OPPOSITES[type(operator)]()], [right]))
            case ast.Call(func=ast.Attribute(value=ast.Name(name), attr="is_contiguous"), args=[], keywords=[]):
                self.contiguous.append(self._tensor(test, name))
            case ast.Attribute(value=ast.Name(name), attr="is_cuda"):
                self._tensor(test, name)  # an op of the binary package has no other device
            case _:
                text = self._text(test)
                if text not in self.requires:
                    self.requires.append(text)

    # --- the launch ---------------------------------------------------------------------------------------------------

    def _kernel_arguments(self, call: ast.Call) -> tuple[ast.FunctionDef, dict[str, ast.expr]]:
        """Return the kernel, and its arguments by the names of its parameters."""
        assert isinstance(call.func, ast.Subscript)
        name = ast.unparse(call.func.value)
        if name not in self.functions:
            self._refuse(call, f"launches {name}, which is not a function of this module")
        kernel = self.functions[name]
        names = [parameter.arg for parameter in kernel.args.args]
        if any(isinstance(value, ast.Starred) for value in call.args) or len(call.args) > len(names):
            self._refuse(call, f"passes {len(call.args)} positional arguments to {name}, which has {len(names)}")
        values = dict(zip(names, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is None:
                self._refuse(call, f"passes {ast.unparse(keyword.value)} as keyword arguments, whose names are unknown")
            if keyword.arg not in (*names, *_LAUNCH_OPTIONS):
                self._refuse(
                    call,
                    f"passes {keyword.arg}, which is neither a parameter of {name} nor one of the options "
                    f"{' and '.join(_LAUNCH_OPTIONS)}",
                )
            values[keyword.arg] = keyword.value
        return kernel, values

    def _by_kind(
        self, kernel: ast.FunctionDef, values: dict[str, ast.expr]
    ) -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
        """Return the arguments of the compiled kernel, the constants, and the constexprs that depend on arguments."""
        arguments: dict[str, str] = {}
        constants: dict[str, Any] = {}
        passed: dict[str, str] = {}
        parameters = kernel.args.args
        defaults = dict(zip([p.arg for p in parameters[::-1]], kernel.args.defaults[::-1], strict=False))
        constexprs = {p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)}
        for name, value in {**defaults, **values}.items():
            if isinstance(value, ast.Constant) and value.value is None:
                constants[name] = None  # Triton compiles a missing pointer as a constant
            elif name not in constexprs and name not in _LAUNCH_OPTIONS:
                arguments[name] = self._text(value)
            elif isinstance(value, ast.Constant):
                constants[name] = value.value
            elif ast.unparse(value).startswith("tl."):
                constants[name] = ast.unparse(value)  # a dtype
            elif name in constexprs:
                passed[name] = self._text(value)
        order = [p.arg for p in parameters if p.arg in arguments]
        return {name: arguments[name] for name in order}, constants, passed

    def _grid(self, call: ast.Call) -> list[str]:
        assert isinstance(call.func, ast.Subscript)
        grid: ast.expr = call.func.slice
        if isinstance(grid, ast.Name):
            grid = self.grids.get(grid.id) or self.locals.get(grid.id) or grid
        if isinstance(grid, ast.Lambda):
            self.meta = grid.args.args[0].arg if grid.args.args else None
            grid = grid.body
        if not isinstance(grid, ast.Tuple) or not 1 <= len(grid.elts) <= 3:
            self._refuse(call, f"has the grid {ast.unparse(grid)}; expected a tuple of 1 to 3 expressions, or a lambda")
        return [self._text(size) for size in grid.elts]

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, tuple[str, ast.expr | None]]:
        """Return the function's parameters: name -> type in the schema, default."""
        arguments = self.function.args
        if arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            self._refuse(self.function, "has parameters *args, **kwargs or positional-only ones")
        parameters = [*arguments.args, *arguments.kwonlyargs]
        defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
        defaults += [*arguments.defaults, *arguments.kw_defaults]
        typed = {}
        for parameter, default in zip(parameters, defaults, strict=True):
            annotation = parameter.annotation and ast.unparse(parameter.annotation).strip("'\"")
            if annotation not in _SCHEMA_TYPES:
                found = f"has the annotation {annotation}" if annotation else "has no annotation"
                self._refuse(parameter, f"parameter {parameter.arg} {found}; expected torch.Tensor, int, float or bool")
            typed[parameter.arg] = (_SCHEMA_TYPES[annotation], default)
        return typed

    def _tensor(self, node: ast.AST, name: str) -> str:
        if self.parameters.get(name, ("",))[0] != "Tensor":
            self._refuse(node, f"uses {name} as a tensor; expected a parameter with the annotation torch.Tensor")
        return name

    def _allocation(self, call: ast.Call) -> str:
        """Return the expression of a tensor that the function allocates."""
        kind = last_name(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if unread := set(keywords) - {"dtype", "device"}:
            self._refuse(
                call, f"allocates a tensor with {', '.join(map(str, unread))}; expected dtype and device alone"
            )
        dtype = keywords.get("dtype") and self._dtype(keywords["dtype"])
        if kind.endswith("_like"):
            source = ast.unparse(call.args[0])
            like = self.tensors.get(source) or f"{kind}({self._tensor(call, source)})"
            if source in self.tensors:
                like = f"{kind.removesuffix('_like')}{like.removeprefix('empty').removeprefix('zeros')}"
            if dtype is None:
                return like
            known = ", dtype=" in like
            return f"{like.rpartition(', dtype=')[0] if known else like.removesuffix(')')}, dtype={dtype})"
        if kind.startswith("new_"):
            assert isinstance(call.func, ast.Attribute)
            dtype = dtype or f"{self._tensor(call, ast.unparse(call.func.value))}.dtype"
        if dtype is None:
            self._refuse(call, "allocates a tensor without a dtype; expected dtype=torch.float32 or dtype=x.dtype")
        shape = call.args[0] if len(call.args) == 1 else ast.Tuple(call.args)
        if isinstance(shape, ast.Attribute) and shape.attr == "shape":
            self._tensor(call, ast.unparse(shape.value))
            return f"{kind.removeprefix('new_')}_like({ast.unparse(shape.value)}, dtype={dtype})"
        sizes = shape.elts if isinstance(shape, ast.Tuple | ast.List) else [shape]
        joined = ", ".join(map(self._text, sizes)) + ("," if len(sizes) == 1 else "")
        return f"{kind.removeprefix('new_')}(({joined}), dtype={dtype})"

    def _dtype(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name):
                return name
            case ast.Attribute(value=ast.Name(name), attr="dtype"):
                return f"{self._tensor(node, name)}.dtype"
        self._refuse(node, f"has the dtype {ast.unparse(node)}; expected a dtype of torch, or of a parameter")

    def _schema(self, kernel: ast.FunctionDef, arguments: dict[str, str]) -> str:
        stored = stored_parameters(kernel, self.functions)
        tensors = [name for name, (kind, _) in self.parameters.items() if kind == "Tensor"]
        mutated = [name for parameter, name in arguments.items() if parameter in stored and name in tensors]
        keyword_only = [parameter.arg for parameter in self.function.args.kwonlyargs]
        shown = []
        for name, (kind, default) in self.parameters.items():
            alias = f"({chr(ord('a') + mutated.index(name))}!)" if name in mutated else ""
            value = "" if default is None else f"={ast.unparse(default)}"
            if name in keyword_only[:1]:
                shown.append("*")
            shown.append(f"{kind}{alias} {name}{value}")
        results = ["Tensor"] * len(self.returned)
        return f"({', '.join(shown)}) -> {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}"

    # --- expressions --------------------------------------------------------------------------------------------------

    def _text(self, node: ast.expr) -> str:
        return ast.unparse(self.visit(copy.deepcopy(node)))

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
                name in {**self.parameters, **self.tensors} and len(arguments) == _METHODS.get(method)
            ):
                node.args = [self.visit(argument) for argument in arguments]
                return node
            case ast.Call(func=function, args=arguments, keywords=[]) if last_name(function) in _FUNCTIONS:
                return ast.Call(ast.Name(last_name(function)), [self.visit(argument) for argument in arguments], [])
            case ast.BinOp(op=operator) if isinstance(operator, _OPERATORS):
                return self.generic_visit(node)
            case ast.BoolOp() | ast.UnaryOp() | ast.Compare() | ast.IfExp() | ast.operator() | ast.unaryop():
                return self.generic_visit(node)
            case ast.boolop() | ast.cmpop():
                return node
        if re.search(r"TensorDescriptor|tma_descriptor", ast.unparse(node)):
            hint = "make the descriptor in the kernel, by tl.make_tensor_descriptor"
            self._refuse(node, "makes a TMA descriptor on the host, which is not supported", hint)
        self._refuse(node, f"has an expression that is not read: `{_first_line(node)}`")

    def _refuse(self, node: ast.AST, message: str, hint: str = "") -> NoReturn:
        line = getattr(node, "lineno", self.function.lineno)
        keys = f"write {', '.join(KEYS[:4])} in [op.{self.function.name}] of aot.toml, or simplify the function"
        raise ConfigError(f"{self.function.name} {message}", where=f"{self.path}:{line}", hint=hint or keys)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]
