"""The code of functions: read, compared with their bytecode, and compiled again."""

import ast
import copy
import dis
import functools
import inspect
import textwrap
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any, Optional

from torch import nn

from .probes import _content

KERNELS = "__blocks"  # the name of this package in rewritten code

_signatures: dict[FunctionType, tuple[Any, inspect.Signature]] = {}


def signature_of(function: Any) -> inspect.Signature:
    """Return `inspect.signature(function)`, found once: diffusers asks for it in each forward."""
    inner = getattr(function, "__func__", None)
    if type(inner) is not FunctionType or inner.__dict__:  # such as the function that it wraps
        return inspect.signature(function)
    made_of = inner.__code__, inner.__defaults__, inner.__kwdefaults__
    known, signature = _signatures.get(inner, (None, None))
    if known != made_of:
        signature = inspect.signature(function)
        _signatures[inner] = made_of, signature
    return signature


def innermost(function: Any) -> Optional[FunctionType]:
    """Return the function that decorators wrap, or None if it is none of Python."""
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else None
    return function if isinstance(function, FunctionType) else None


def methods_of(cls: type) -> dict[str, Any]:
    """Return the methods of a class that may run in its forward: its own, and those that these call."""
    library = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    names = [name for name in vars(cls) if not name.startswith("__")] if library else []
    methods: dict[str, Any] = {}
    names.append("forward")
    while names:
        name = names.pop()
        owner = next((base for base in library if name in vars(base)), None)
        if owner is None or name in methods or innermost(vars(owner)[name]) is None:
            continue
        methods[name] = vars(owner)[name]
        names += innermost(methods[name]).__code__.co_names
    return methods


def functions_used(cls: type, call: Any) -> tuple[Any, ...]:
    """Return the functions of their modules that the methods of a class, and of its attention processor, call now."""
    used = []
    for inner in map(innermost, (*methods_of(cls).values(), call)):
        for name in inner.__code__.co_names if inner is not None else ():
            value = inner.__globals__.get(name)
            if isinstance(value, (FunctionType, nn.Module)):
                used.append(value)
    return tuple(used)


def rewrapped(function: Any, inner: FunctionType, new: FunctionType) -> Optional[FunctionType]:
    """Apply the decorators of `inner` to `new`; None if they hide it."""
    if function is inner:
        return new
    wrapped = function.__wrapped__
    below = rewrapped(wrapped, inner, new)
    itself = CellType()
    cells = []
    for cell in function.__closure__ or ():
        content = _content(cell)
        cells.append(itself if content is function else CellType(below) if content is wrapped else cell)
    hidden = all(_content(cell) is not wrapped for cell in function.__closure__ or ())
    if below is None or hidden or not isinstance(function, FunctionType):
        return None
    itself.cell_contents = outer = _like(function, function.__code__, tuple(cells))
    outer.__wrapped__ = below
    return outer


def _like(function: FunctionType, code: CodeType, cells: tuple[CellType, ...]) -> FunctionType:
    new = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, new.__doc__ = function.__kwdefaults__, function.__doc__
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    new.__dict__.update(function.__dict__)
    return new


@functools.cache
def parsed(function: FunctionType) -> Optional[ast.FunctionDef]:
    """Return the source of a function, if it runs that source."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        (node,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, SyntaxError, ValueError, TypeError):
        return None
    if not isinstance(node, ast.FunctionDef) or any(isinstance(n, (ast.Yield, ast.Await)) for n in ast.walk(node)):
        return None
    ast.increment_lineno(node, first - 1)
    node.name = f"{KERNELS}_function"  # a name that the function does not mean
    node.decorator_list, node.returns = [], None
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.copy_location(ast.Constant(None), value) for value in arguments.defaults]
    arguments.kw_defaults = [
        value if value is None else ast.copy_location(ast.Constant(None), value) for value in arguments.kw_defaults
    ]
    same = _is_same(compiled(copy.deepcopy(node), function, SimpleNamespace()).__code__, function.__code__)
    return node if same else None


def compiled(node: ast.FunctionDef, function: FunctionType, kernels: SimpleNamespace) -> FunctionType:
    """Return `function` with the code of `node`, in which the name `__blocks` is `kernels`."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells[KERNELS] = CellType(kernels)
    arguments = ast.arguments([], [ast.arg(name) for name in cells], None, [], [], None, [])
    outer = ast.FunctionDef("outer", arguments, [node], [])
    outer.type_params = []  # asked for by Python 3.12
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, node)], []))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    for name in ("outer", node.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    code = code.replace(co_name=function.__code__.co_name)
    return _like(function, code, tuple(cells[name] for name in code.co_freevars))


def _is_same(code: CodeType, other: CodeType) -> bool:
    if code.co_varnames != other.co_varnames or _operations(code) != _operations(other):
        return False
    inner, others = ([c for c in each.co_consts if isinstance(c, CodeType)] for each in (code, other))
    return len(inner) == len(others) and all(map(_is_same, inner, others))


def _operations(code: CodeType) -> list[tuple[str, Any]]:
    """Return a function's operations, independent of the names that the compiler knew."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (step.opname.replace("METHOD", "ATTR"), _argument(step))
        for step in dis.get_instructions(code)
        if step.opname not in ("NOP", "PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG") and step.opcode not in jumps
    ]


# The operations whose argument is a name or a constant. Docstrings lose their indentation, and are not loaded.
_NAMED = {*dis.hasname, *dis.haslocal, *dis.hasfree} | {dis.opmap["LOAD_CONST"]}


def _argument(step: dis.Instruction) -> Any:
    return step.argval if step.opcode in _NAMED and not isinstance(step.argval, CodeType) else None
