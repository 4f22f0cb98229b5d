"""Reads an op's keys of aot.toml from the source of its launch function.

A simple launch function checks its arguments, allocates the outputs, computes sizes, launches one kernel and returns
the outputs. It is read and never executed. Any other construct raises an error, and the author writes the keys instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_aot.launch_expressions import ALLOCATIONS, LaunchExpressions
from kernel_aot.syntax import find_stores, last_name, read_functions
from kernel_format.errors import ConfigError

KEYS = ("schema", "outputs", "arguments", "grid")
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages")


def read_launch_function(path: Path, function: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an op's table that its launch function determines, or {} if the author wrote all of them.

    Args:
        path: The module with the launch function and its kernel.
        function: The name of the launch function, which is the op's.
        table: The op's table in aot.toml.

    Returns:
        `schema`, `outputs`, `arguments`, `grid` and `constants` as in aot.toml; `requires` and `contiguous` from the
        function's assertions and the table's `constants`; and `passed`, the other constexprs: name -> expression.

    Raises:
        ConfigError: If the function is missing, contradicts the table, or has a construct that this module does not
            read.
    """
    if all(key in table for key in KEYS):
        return {}
    functions = read_functions(path)
    if function not in functions:
        raise ConfigError(
            f"has no function {function}, which [op.{function}] of aot.toml names",
            where=str(path),
            hint=f"define it at the top level, or name the table after one of {', '.join(functions)}",
        )
    return _Reader(path, functions, functions[function], table).read()


class _Reader:
    """Reads the statements of one launch function."""

    def __init__(
        self, path: Path, functions: Mapping[str, ast.FunctionDef], function: ast.FunctionDef, table: Mapping[str, Any]
    ) -> None:
        self.functions, self.function, self.table = functions, function, table
        self.declared: Mapping[str, Any] = table.get("constants", {})
        self.expressions = LaunchExpressions(path, function)
        self.refuse = self.expressions.refuse
        self.grids: dict[str, ast.expr] = {}
        self.launch: ast.Call | None = None
        self.constexprs: set[str] = set()
        self.requires: list[str] = []
        self.contiguous: list[str] = []
        self.returned: list[str] = []

    def read(self) -> dict[str, Any]:
        for statement in _statements(self.function.body):
            self._read_statement(statement)
        if self.launch is None:
            self.refuse(self.function, "launches no kernel: expected one `kernel[grid](...)`")
        assert isinstance(self.launch.func, ast.Subscript)
        kernel, values = self._kernel_arguments(self.launch, ast.unparse(self.launch.func.value))
        arguments, constants, passed = self._by_kind(kernel, values)
        for name in self.expressions.tensors:
            if name not in self.returned:
                self.refuse(self.function, f"allocates {name}, and does not return it")
        return {
            "schema": self._schema(kernel, arguments),
            "outputs": {name: self.expressions.tensors[name] for name in self.returned},
            "arguments": arguments,
            "grid": self._grid(self.launch, self.launch.func.slice),
            "constants": constants,
            "requires": self.requires,
            "contiguous": self.contiguous,
            "passed": passed,
        }

    def _read_statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assert(test=test):
                self._require(test)
            case ast.If(test=test, body=[ast.Raise()], orelse=[]):
                self._require(test, holds=False)
            case ast.Assign(targets=[ast.Name(grid)], value=ast.Lambda() as value):
                self.grids[grid] = value
            case ast.Assign(targets=[ast.Name() as name], value=value):
                self._assign(name, value)
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)],
                value=ast.Attribute(value=tensor, attr="shape")
                | ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[]),
            ):
                self._require(_expression(f"{ast.unparse(tensor)}.dim() == {len(targets)}"))
                for index, target in enumerate(targets):
                    self._assign(target, _expression(f"{ast.unparse(tensor)}.size({index})"))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(
                values
            ) and not {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}.intersection(
                map(ast.unparse, targets)
            ):
                for target, element in zip(targets, values, strict=True):
                    self._assign(target, element)
            case ast.FunctionDef(name=grid, args=args, body=[ast.Return(value=ast.expr() as value)]):
                self.grids[grid] = ast.Lambda(args, value)
            case ast.Expr(value=ast.Call(func=ast.Subscript()) as call):
                if self.launch is not None:
                    self.refuse(statement, "launches a second kernel; expected one launch for an op")
                self.launch = call
            case ast.Return(value=value):
                results = value.elts if isinstance(value, ast.Tuple) else [value] if value is not None else []
                self.returned = [ast.unparse(result) for result in results]
                for result in self.returned:
                    if result not in self.expressions.tensors:
                        self.refuse(statement, f"returns {result}, which is not a tensor that the function allocates")
            case _:
                self.refuse(statement, f"has a statement that is not read: `{ast.unparse(statement).splitlines()[0]}`")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            self.refuse(target, f"assigns to {ast.unparse(target)}; expected a name")
        if target.id in self.expressions.parameters:
            self.refuse(value, f"assigns to its parameter {target.id}")
        if self.launch is not None and target.id in self.expressions.locals:
            self.refuse(target, f"assigns to {target.id} after the launch")
        allocates = isinstance(value, ast.Call) and last_name(value.func) in ALLOCATIONS
        if target.id in (self.expressions.locals if allocates else self.expressions.tensors):
            self.refuse(target, f"assigns a tensor and another value to {target.id}; use two names")
        if isinstance(value, ast.Call) and allocates:
            self.expressions.tensors[target.id] = self.expressions.allocation(value)
        elif target.id != "_":
            self.expressions.locals[target.id] = self.expressions.value(value)

    def _require(self, test: ast.expr, holds: bool = True) -> None:
        """Add the conditions under which a test has a value."""
        for condition in _conditions(test, holds):
            match condition:
                case ast.Call(func=ast.Attribute(value=ast.Name(name), attr="is_contiguous"), args=[], keywords=[]):
                    self.contiguous.append(self.expressions.tensor(condition, name))
                case ast.Attribute(value=ast.Name(name), attr="is_cuda"):
                    self.expressions.tensor(condition, name)  # an op of the binary package has no other device
                case _:
                    text = self.expressions.text(condition)
                    if text not in self.requires:
                        self.requires.append(text)

    def _kernel_arguments(self, call: ast.Call, name: str) -> tuple[ast.FunctionDef, dict[str, ast.expr]]:
        """Return the kernel, and its arguments by the names of its parameters."""
        if name not in self.functions:
            self.refuse(call, f"launches {name}, which is not a function of this module")
        kernel = self.functions[name]
        names = [parameter.arg for parameter in kernel.args.args]
        if any(isinstance(value, ast.Starred) for value in call.args) or len(call.args) > len(names):
            self.refuse(call, f"passes {len(call.args)} positional arguments to {name}, which has {len(names)}")
        values = dict(zip(names, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is None:
                self.refuse(call, f"passes {ast.unparse(keyword.value)} as keyword arguments, whose names are unknown")
            if keyword.arg not in (*names, *_LAUNCH_OPTIONS):
                neither = f"neither a parameter of {name} nor one of the options {' and '.join(_LAUNCH_OPTIONS)}"
                self.refuse(call, f"passes {keyword.arg}, which is {neither}")
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
        self.constexprs = {p.arg for p in parameters if p.annotation and "constexpr" in ast.unparse(p.annotation)}
        for name, value in {**defaults, **values}.items():
            if name in self.constexprs and name in values:
                self._compare(name, value)
            if name in self.constexprs and name in self.declared:
                continue
            if isinstance(value, ast.Constant) and value.value is None:
                constants[name] = None  # Triton compiles a missing pointer as a constant
            elif name not in self.constexprs and name not in _LAUNCH_OPTIONS:
                arguments[name] = self.expressions.text(value)
            elif isinstance(value, ast.Constant):
                constants[name] = value.value
            elif ast.unparse(value).startswith("tl."):
                constants[name] = ast.unparse(value)  # a dtype
            elif name in self.constexprs:
                passed[name] = self.expressions.text(value)
        return {p.arg: arguments[p.arg] for p in parameters if p.arg in arguments}, constants, passed

    def _compare(self, name: str, value: ast.expr) -> None:
        """Refuse a constant that aot.toml contradicts; require of each call the values that its `constants` declare."""
        if isinstance(value, ast.Constant):
            for table in (self.declared, *self.table.get("config", ())):
                if table.get(name, value.value) != value.value:
                    hint = f"make them equal, or remove {name} from one of them"
                    self.refuse(value, f"passes {name}={value.value!r}, and aot.toml has {table[name]!r}", hint)
        elif not isinstance(self.declared.get(name, ""), str):  # a dtype is not an expression
            self._require(_expression(f"({ast.unparse(value)}) == {self.declared[name]}"))

    def _grid(self, call: ast.Call, grid: ast.expr) -> list[str]:
        if isinstance(grid, ast.Name):
            grid = self.grids.get(grid.id) or self.expressions.locals.get(grid.id) or grid
        if isinstance(grid, ast.Lambda):
            self.expressions.meta = grid.args.args[0].arg if grid.args.args else None
            grid = grid.body
        if not isinstance(grid, ast.Tuple) or not 1 <= len(grid.elts) <= 3:
            self.refuse(call, f"has the grid {ast.unparse(grid)}; expected a tuple of 1 to 3 expressions, or a lambda")
        return [self.expressions.text(size) for size in grid.elts]

    def _schema(self, kernel: ast.FunctionDef, arguments: Mapping[str, str]) -> str:
        parameters = self.expressions.parameters
        tensors = [name for name, (kind, _) in parameters.items() if kind == "Tensor"]
        (stores, _), elsewhere = find_stores(kernel, self.functions), dict[str, None]()
        stored = set[str]().union(*stores)
        doubtful = set[str]().union(*find_stores(kernel, self.functions, elsewhere=elsewhere)[0]) - stored
        found = [name for parameter, name in arguments.items() if parameter in doubtful and name in tensors]
        known = (*tensors, *self.expressions.tensors)
        numbers = self.constexprs.union(name for name, value in arguments.items() if value not in known)
        message = ""
        if found:
            message = f"may store through {', '.join(found)} by functions of other modules: {', '.join(elsewhere)}"
        elif any(pointer <= numbers for pointer in stores):
            message = "stores through a pointer that is not computed of its arguments, such as one that it has loaded"
        if message and "schema" not in self.table:
            hint = f"write schema in [op.{self.function.name}] of aot.toml: Tensor(a!) is a tensor that the op writes"
            self.refuse(kernel, f"launches {kernel.name}, which {message}", hint)
        mutated = [name for parameter, name in arguments.items() if parameter in stored and name in tensors]
        keyword_only = [parameter.arg for parameter in self.function.args.kwonlyargs]
        shown = []
        for name, (kind, default) in parameters.items():
            alias = f"({chr(ord('a') + mutated.index(name))}!)" if name in mutated else ""
            value = "" if default is None else f"={ast.unparse(default)}"
            if name in keyword_only[:1]:
                shown.append("*")
            shown.append(f"{kind}{alias} {name}{value}")
        results = ", ".join(["Tensor"] * len(self.returned))
        return f"({', '.join(shown)}) -> {results if len(self.returned) == 1 else f'({results})'}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements without docstrings, and those in a `with` of the device."""
    for statement in body:
        if isinstance(statement, ast.With) and all(
            ast.unparse(item.context_expr).startswith(("torch.cuda.device(", "torch.device(", "torch.no_grad("))
            for item in statement.items
        ):
            yield from _statements(statement.body)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            yield statement


def _conditions(test: ast.expr, holds: bool) -> Iterator[ast.expr]:
    """Yield conditions which together are equivalent to a test, or to its opposite."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _conditions(operand, not holds)
        case ast.BoolOp(op=operator, values=values) if isinstance(operator, ast.And if holds else ast.Or):
            for value in values:
                yield from _conditions(value, holds)
        case ast.Compare(left=left, ops=[first, second, *more], comparators=[middle, *rest]) if holds:
            yield ast.Compare(left, [first], [middle])
            yield from _conditions(ast.Compare(middle, [second, *more], rest), holds)
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if not holds and type(operator) in _OPPOSITES:
            yield ast.Compare(left, [_OPPOSITES[type(operator)]()], [right])
        case _:
            yield test if holds else ast.UnaryOp(ast.Not(), test)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
