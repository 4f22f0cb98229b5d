"""Rewrites forwards: their own code, with calls of the kernels in place of the expressions that these compute.

A forward keeps everything else that it does, and whatever somebody made of it. Expressions are replaced whose norms,
activations and rotary functions `norms`, `gated` and `rotary` have recognised by what they compute:

- `act(gate) * up`,
- `norm(x) * (1 + scale) + shift`, also where a function of the module computes it of its arguments, and
  `x + gate * branch`,
- `x = x + branch` followed by `norm(x)`, with or without gates and modulations,
- calls of rotary functions, and of such functions with the norms of q and k before them,
- `torch.nn.GELU` after a projection, which fits into the epilogue of its matrix product.

Each is replaced by a call that looks at its arguments, and computes the expression itself where the kernels cannot.
"""

import ast
import builtins
import copy
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Optional

from torch import nn

from . import gated, norms, rotary, tokens
from .probes import _content

_KERNELS = "__blocks"
_MISSING = object()
_Body = list[ast.stmt]

# What is replaced, for the report, by the function that is called instead.
_DOES = {
    "gated": "activation of the gate, and the product",
    "gated_reversed": "activation of the gate, and the product",
    "modulated": "norm with modulation",
    "gated_sum": "residual sum with gate",
    "sum_gated": "residual sum with gate",
    "sum_norm": "residual sum with norm",
    "gated_sum_norm": "residual sum with gate and norm",
    "sum_modulated": "residual sum with norm and modulation",
    "gated_sum_modulated": "residual sum with gate, norm and modulation",
    "rotated": "rotary embedding",
    "norm_rotated": "q/k norm with rotary embedding",
    "activated_projection": "GELU in the epilogue of its projection",
    "joined_tokens": "parts of one tensor joined without a copy",
}
_FUNCTIONS = {
    name: getattr(module, name) for module in (gated, norms, rotary, tokens) for name in _DOES if name in vars(module)
}


@dataclass
class Rewriting:
    """What became of a function.

    Attributes:
        function: The function rewritten, or None if it has nothing that the kernels compute.
        does: What the kernels compute in it, each with their names.
        misses: What it has that looks as if they could, and why they cannot.
    """

    function: Optional[FunctionType] = None
    does: dict[str, set[str]] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)


def rewritten(function: Any, roots: dict[str, Any], processing: Optional["Processing"] = None) -> Rewriting:
    """Rewrite a function.

    Args:
        function: A method, or `__call__` of an attention processor, without its decorators.
        roots: What its parameters are: `self`, and the module that a processor is called with.
        processing: What is called in place of the module's attention processor, or None.
    """
    node = _parsed(function)
    if node is None or "locals" in function.__code__.co_names:
        return Rewriting(misses=["the source of its forward cannot be read"])
    rewriter = _Rewriter(function, roots, processing)
    node = copy.deepcopy(node)
    node.body = rewriter.rewrite(node.body)
    result = Rewriting(None, rewriter.does, rewriter.misses)
    if rewriter.does:
        kernels = SimpleNamespace(
            **_FUNCTIONS, begun=gated.begun, normed_later=rotary.normed_later, **rewriter.constants
        )
        result.function = _while_same(rewriter.inlined, _function(node, function, kernels), function)
    return result


def _while_same(inlined: dict[str, FunctionType], new: FunctionType, function: FunctionType) -> FunctionType:
    """Return a function that runs `new` as long as the functions are the same whose code is in it."""
    if not inlined:
        return new
    present = function.__globals__

    def either(*args: Any, **kwargs: Any) -> Any:
        same = all(present.get(name) is value for name, value in inlined.items())
        return (new if same else function)(*args, **kwargs)

    return either


@dataclass(frozen=True)
class Processing:
    """An attention processor's method, rewritten.

    Attributes:
        present: The method of the processor's class.
        new: What is called in its place.
        does: What the kernels compute in it.
    """

    present: Any
    new: Any
    does: dict[str, set[str]]

    def __call__(self, processor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(processor).__call__ is self.present:
            return self.new(processor, *args, **kwargs)
        return processor(*args, **kwargs)


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
    """Return what decorators made of `inner`, made of `new`; None if they hide it."""
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


# --- code -------------------------------------------------------------------------------------------------------------


@functools.cache
def _parsed(function: FunctionType) -> Optional[ast.FunctionDef]:
    """Return the source of a function, if that is what it runs."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)
        (node,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, SyntaxError, ValueError, TypeError):
        return None
    if not isinstance(node, ast.FunctionDef) or any(isinstance(n, (ast.Yield, ast.Await)) for n in ast.walk(node)):
        return None
    ast.increment_lineno(node, first - 1)
    node.name = f"{_KERNELS}_function"  # a name that the function does not mean
    node.decorator_list, node.returns = [], None
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.copy_location(ast.Constant(None), value) for value in arguments.defaults]
    arguments.kw_defaults = [
        value if value is None else ast.copy_location(ast.Constant(None), value) for value in arguments.kw_defaults
    ]
    same = _is_same(_function(copy.deepcopy(node), function, SimpleNamespace()).__code__, function.__code__)
    return node if same else None


def _function(node: ast.FunctionDef, function: FunctionType, kernels: SimpleNamespace) -> FunctionType:
    """Return `function` with the code of `node`, in which the name `__blocks` is `kernels`."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells[_KERNELS] = CellType(kernels)
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
    """Return what a function does, whatever the compiler knew about the names of its module."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (step.opname.replace("METHOD", "ATTR"), _argument(step))
        for step in dis.get_instructions(code)
        if step.opname not in ("NOP", "PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG") and step.opcode not in jumps
    ]


def _argument(step: dis.Instruction) -> Any:
    return step.argval if step.opcode in _NAMED and not isinstance(step.argval, CodeType) else None


# The operations whose argument is a name or a constant. Docstrings lose their indentation, and are not loaded.
_NAMED = {*dis.hasname, *dis.haslocal, *dis.hasfree} | {dis.opmap["LOAD_CONST"]}


# --- patterns ---------------------------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    def __init__(self, function: FunctionType, roots: dict[str, Any], processing: Optional[Processing]) -> None:
        self._processing = processing
        self.does: dict[str, set[str]] = {}
        self.misses: list[str] = []
        self.constants: dict[str, Any] = {}
        self.inlined: dict[str, FunctionType] = {}
        self._function = function
        self._roots = roots
        self._locals = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
        self._closure = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        self._all: list[ast.Name] = []
        self._has_norm, self._may_join = False, True
        self._matches = self._sums = 0
        self._counting = False

    def rewrite(self, body: _Body) -> _Body:
        for statement in body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    self._all.append(node)
                elif isinstance(node, ast.Call) and isinstance(self._resolve(node.func), nn.Module):
                    self._has_norm = self._has_norm or _has_norm(self._resolve(node.func))
                self._may_join = self._may_join and not _is_in_place(node)
        self._may_join = self._may_join and self._has_norm
        return self._body(body)

    def _body(self, body: _Body) -> _Body:
        for statement in body:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    setattr(statement, name, self._body(inner))
            for handler in getattr(statement, "handlers", ()):
                handler.body = self._body(handler.body)
        self._merge(body)
        self._rotate(body)
        for index, statement in enumerate(body):
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.FunctionDef)):
                body[index] = self.visit(statement)
        self._sum(body)
        return body

    # Functions and classes inside have names of their own.
    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    visit_ClassDef = visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_Lambda

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if rotary.gets_tables([argument.arg for argument in node.args.args]):
            self.misses.append(f"{node.name} is made anew at each call, so nothing can tell what it computes")
        return node

    # --- what names are ---

    def _resolve(self, node: ast.AST) -> Any:
        """Return what an expression is while the function runs, as far as that is the same each time."""
        if isinstance(node, ast.Name):
            if node.id in self._roots:
                return self._roots[node.id]
            if node.id in self._locals:
                return _MISSING
            if node.id in self._closure:
                return _content(self._closure[node.id])
            return self._function.__globals__.get(node.id, getattr(builtins, node.id, _MISSING))
        if not isinstance(node, ast.Attribute):
            return _MISSING
        owner = self._resolve(node.value)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, _MISSING)
        is_root = any(owner is root for root in self._roots.values())
        if not (isinstance(owner, nn.Module) or is_root):
            return _MISSING
        if isinstance(inspect.getattr_static(type(owner), node.attr, None), property):
            return _MISSING
        return getattr(owner, node.attr, _MISSING)

    def _norm_of(self, node: ast.AST) -> Optional[nn.Module]:
        """Return the norm that a call is of, with nothing but its input."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
            return None
        norm = self._resolve(node.func)
        if not isinstance(norm, nn.Module) or isinstance(node.args[0], ast.Starred):
            return None
        return norm if norms.recognised_norm(norm) is not None else None

    def _activation_of(self, node: ast.AST) -> Optional[ast.expr]:
        """Return the activation that a call is of, with nothing but its input."""
        if not (isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)):
            return None
        activation = self._resolve(node.func)
        if activation is _MISSING or (isinstance(activation, nn.Module) and activation._modules):
            return None
        if not node.keywords:
            if gated.activation_of(activation) is not None:
                return node.func
            return None
        options = _constants(node.keywords)
        if options is None or not isinstance(activation, (FunctionType, BuiltinFunctionType)):
            return None
        partial = functools.partial(activation, **options)
        return self._constant(partial) if gated.activation_of(partial) is not None else None

    def _constant(self, value: Any) -> ast.expr:
        name = f"constant{len(self.constants)}"
        self.constants[name] = value
        return ast.Attribute(ast.Name(_KERNELS, ast.Load()), name, ast.Load())

    def _call(self, name: str, kernels: Sequence[str], node: ast.AST, *arguments: ast.expr) -> ast.expr:
        # A kernel of ours outweighs an epilogue: the activation of a gate is computed with the product.
        self._matches += 2 if kernels else 1
        if not self._counting:
            self.does.setdefault(_DOES[name], set()).update(kernels)
        function = ast.Attribute(ast.Name(_KERNELS, ast.Load()), name, ast.Load())
        return ast.fix_missing_locations(ast.copy_location(ast.Call(function, list(arguments), []), node))

    # --- expressions ---

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        modulated = self._modulated(node)
        if modulated is not None:
            return modulated
        if isinstance(node.op, ast.Mult):
            # Before the operands are visited: a GELU of a projection alone would go to its epilogue.
            if self._activation_of(node.left) is not None:
                return self._call("gated", ["geglu"], node, self._begun(node.left), self.visit(node.right))
            if self._activation_of(node.right) is not None:
                return self._call("gated_reversed", ["geglu"], node, self.visit(node.left), self._begun(node.right))
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(node.op, ast.Mult):
            self._miss_activation(left)
            self._miss_activation(right)
        if isinstance(node.op, ast.Add) and self._has_norm:
            if self._is_gated(right) and not self._is_number(left) and not _is_product(left):
                return self._call("gated_sum", ["adaln"], node, left, right.left, right.right)
            if self._is_gated(left) and not self._is_number(right) and not _is_product(right):
                return self._call("sum_gated", ["adaln"], node, left.left, left.right, right)
        return node

    def _begun(self, call: Any) -> ast.expr:
        begun = ast.Attribute(ast.Name(_KERNELS, ast.Load()), "begun", ast.Load())
        return ast.Call(begun, [self._activation_of(call), self.visit(call.args[0])], [])

    def _miss_activation(self, node: ast.AST) -> None:
        activation = self._resolve(node.func) if isinstance(node, ast.Call) and len(node.args) == 1 else None
        if isinstance(activation, nn.Module):
            inner = activation._modules or activation._parameters or norms.recognised_norm(activation) is not None
            unknown = not inner and gated.activation_of(activation) is None
        else:
            unknown = gated.is_unknown_activation(activation)
        if unknown:
            name = getattr(activation, "__name__", type(activation).__name__)
            self.misses.append(f"its activation is {name}, which no kernel computes")

    def _is_number(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) or type(self._resolve(node)) in (int, float)

    def _is_gated(self, node: Any) -> bool:
        """Return whether a product may be of a gate and a branch, and not of a norm and `1 + scale`."""
        if not _is_product(node) or self._is_number(node.left) or self._is_number(node.right):
            return False
        return _without_one(node.left) is None and _without_one(node.right) is None

    def _modulated(self, node: ast.BinOp) -> Optional[ast.expr]:
        if not isinstance(node.op, ast.Add):
            return None
        for product, shift in ((node.left, node.right), (node.right, node.left)):
            if not _is_product(product):
                continue
            for normed, factor in ((product.left, product.right), (product.right, product.left)):
                scale = _without_one(factor)
                if scale is not None and self._norm_of(normed) is not None:
                    parts = [self.visit(part) for part in (normed.args[0], scale, shift)]
                    return self._call("modulated", ["adaln"], node, normed.func, *parts)
        return None

    def _inlined(self, node: ast.Call) -> Optional[ast.expr]:
        """Return what a function of the module returns, of the arguments of a call, if it is one expression of them."""
        function = self._resolve(node.func) if isinstance(node.func, ast.Name) else None
        if not isinstance(function, FunctionType) or function is not self._function.__globals__.get(node.func.id):
            return None
        given = dict(zip(function.__code__.co_varnames, node.args))
        given.update((str(keyword.arg), keyword.value) for keyword in node.keywords)
        if not any(self._norm_of(value) is not None for value in given.values()):
            return None
        if function.__code__.co_argcount != len(given) or any(isinstance(value, ast.Starred) for value in node.args):
            return None
        if sum(not _is_pure(value) for value in given.values()) > 1:
            return None  # they are computed in another order
        definition = _parsed(function)
        body = [] if definition is None else definition.body[_has_docstring(definition) :]
        value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        if value is None or sorted(n.id for n in ast.walk(value) if isinstance(n, ast.Name)) != sorted(given):
            return None  # each argument is computed once
        value = copy.deepcopy(value)
        for inner in ast.walk(value):
            ast.copy_location(inner, node)
        return _Substitution(given).visit(value)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._processing is not None and _is_processor(node.func):
            for what, kernels in self._processing.does.items():
                self.does.setdefault(what, set()).update(kernels)
            self.generic_visit(node)
            return ast.Call(self._constant(self._processing), [node.func, *node.args], node.keywords)
        inlined = self._inlined(node)
        modulated = self._modulated(inlined) if isinstance(inlined, ast.BinOp) else None
        if modulated is not None:
            self.inlined[node.func.id] = self._resolve(node.func)
            return modulated
        call = self._rotary_of(node)
        self.generic_visit(node)
        if self._may_join and _is_cat(node):
            return self._call("joined_tokens", (), node, *node.args[0].elts)
        if call is not None:
            new = self._call("rotated", ["rope3d"], node, self._constant(call), node.func, *node.args)
            new.keywords = node.keywords
            return new
        if gated.HAS_EPILOGUE and len(node.args) == 1 and not node.keywords and isinstance(node.args[0], ast.Call):
            projected = node.args[0]
            is_linear = isinstance(self._resolve(projected.func), nn.Linear) and len(projected.args) == 1
            activation = self._resolve(node.func)
            if is_linear and activation is not _MISSING and gated.activation_of(activation) == "tanh":
                return self._call("activated_projection", (), node, node.func, projected.func, projected.args[0])
        return node

    def _rotary_of(self, node: ast.AST) -> Optional[rotary.RotaryCall]:
        if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        if not isinstance(node.func, ast.Name) or len(node.args) + len(node.keywords) < 2:
            return None
        function = self._resolve(node.func)
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        # A table may be given by name: what it is does not change what the function computes.
        options = {name: value.value for name, value in named.items() if isinstance(value, ast.Constant) and name}
        if None in named or function is _MISSING:
            return None
        tables = [name for name in named if name not in options]
        call = rotary.recognised_rotary(function, len(node.args) + len(tables), options)
        if call is None and rotary.is_candidate(function):
            self.misses.append(f"{node.func.id} computes no rotary embedding that a kernel does")
        return call

    # --- statements ---

    def _merge(self, body: _Body) -> None:
        """Put expressions into the one place where they are used, where that gives a pattern."""
        index = 0
        while index < len(body):
            target, value = _assigned(body[index])
            if target is None or not (
                self._norm_of(value) is not None or self._activation_of(value) is not None or _is_product(value)
            ):
                index += 1
                continue
            user = self._only_user(body, index, target, value)
            if user is not None:
                merged = _Substitution({target: value}).visit(copy.deepcopy(body[user]))
                if self._count(merged) > self._count(body[index]) + self._count(body[user]):
                    body[user] = merged
                    del body[index]
                    continue
            index += 1

    def _count(self, statement: ast.stmt) -> int:
        before, self._matches, self._counting = self._matches, 0, True
        constants = dict(self.constants)
        self.visit(copy.deepcopy(statement))
        matches, self._matches, self._counting, self.constants = self._matches, before, False, constants
        return matches

    def _only_user(self, body: _Body, index: int, target: str, value: ast.expr) -> Optional[int]:
        """Return the statement after `index` that may compute `target` itself: the only one that reads it."""
        read = _loaded(value) - self._roots.keys()
        for user in range(index + 1, min(index + 6, len(body))):
            statement = body[user]
            if not _is_plain(statement):
                return None
            loads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == target]
            if any(isinstance(n.ctx, ast.Load) for n in loads):
                once = sum(isinstance(n.ctx, ast.Load) for n in loads) == 1
                return user if once and self._is_dead_after(body, user, target) else None
            if loads or (read | {target}) & (_stored(statement) | _loaded(statement)):
                return None
        return None

    def _is_dead_after(self, body: _Body, user: int, name: str) -> bool:
        if name in _stored(body[user]):
            return True
        for statement in body[user + 1 :]:
            if name in _loaded(statement):
                return False
            if name in _stored(statement) and _assigned(statement)[0] == name:
                return True
        last = body[user].end_lineno or 0
        loads = [n.lineno for n in self._all if n.id == name and not isinstance(n.ctx, ast.Store)]
        if self._has_loop():  # which may come back to any of them
            return all(body[user].lineno <= line <= last for line in loads)
        return all(line <= last for line in loads)

    def _has_loop(self) -> bool:
        node = _parsed(self._function)
        return node is None or any(isinstance(inner, (ast.For, ast.While)) for inner in ast.walk(node))

    def _rotate(self, body: _Body) -> None:
        """Compute the norms of q and k together with the rotary embedding that follows them."""
        for index, statement in enumerate(body):
            call = statement.value if isinstance(statement, ast.Assign) else None
            rotates = self._rotary_of(call) if call is not None else None
            if rotates is None or len(call.args) < rotates.tensors:
                continue
            places = [self._normed_at(body, index, argument) for argument in call.args[: rotates.tensors]]
            wholes = {place[1] for place in places if place is not None}
            if None in places or len(wholes) != 1:
                continue
            funcs = []
            for place in places:
                holder, _, normed = place
                funcs.append(normed.func)
                later = ast.Attribute(ast.Name(_KERNELS, ast.Load()), "normed_later", ast.Load())
                call_later = ast.copy_location(ast.Call(later, [normed.func, normed.args[0]], []), normed)
                body[holder] = ast.fix_missing_locations(_Exchange(normed, call_later).visit(body[holder]))
            arguments = [self.visit(argument) for argument in call.args]
            new = self._call(
                "norm_rotated",
                ["rope3d"],
                call,
                self._constant(rotates),
                ast.Tuple(funcs, ast.Load()),
                ast.Constant(wholes.pop()),
                call.func,
                *arguments,
            )
            new.keywords = call.keywords
            statement.value = new

    def _normed_at(self, body: _Body, index: int, x: ast.expr) -> Optional[tuple[int, bool, ast.Call]]:
        """Return where the input of a rotary function is normalized, whether all heads are at once, and the call."""
        if not isinstance(x, ast.Name):
            return None
        split = False
        for holder in range(index - 1, -1, -1):
            target, value = _assigned(body[holder])
            if target != x.id:
                if not _is_plain(body[holder]) or x.id in _loaded(body[holder]) | _stored(body[holder]):
                    return None
                continue
            value, changed = _transposed_from(value)
            split = split or changed == "split"
            if isinstance(value, ast.Name) and value.id == x.id and changed:
                continue
            norm = self._norm_of(value)
            form = None if norm is None else norms.recognised_norm(norm)
            if form is None or form.centered or (split and form.width is None):
                return None
            return holder, split, value
        return None

    def _sum(self, body: _Body) -> None:
        """Compute sums together with the norms that follow them."""
        index = 0
        while index < len(body):
            target, value = _assigned(body[index])
            parts = self._sum_of(value) if target is not None else None
            if parts is not None:
                self._sum_at(body, index, target, parts)
            index += 1

    def _sum_of(self, value: Optional[ast.expr]) -> Optional[tuple[str, list[ast.expr]]]:
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return "sum", [value.left, value.right]
        name = _kernel_of(value)
        if name == "gated_sum":
            return "gated_sum", value.args
        if name == "sum_gated":
            first, second, residual = value.args
            return ("gated_sum", [residual, first, second]) if _is_pure(residual) else None
        return None

    def _sum_at(self, body: _Body, index: int, target: str, parts: tuple[str, list[ast.expr]]) -> None:
        kind, operands = parts
        names, between = {target}, set()
        for user in range(index + 1, min(index + 5, len(body))):
            statement = body[user]
            if not _is_plain(statement):
                return
            alias, value = _assigned(statement)
            if alias is not None and isinstance(value, ast.Name) and value.id in names:
                names.add(alias)
                continue
            normed = self._norm_in(statement, names, between)
            if normed is not None:
                break
            if names & (_stored(statement) | _loaded(statement)):
                return
            between |= _stored(statement)
        else:
            return
        if _kernel_of(normed) == "modulated":
            norm, _, scale, shift = normed.args
            name, arguments = f"{kind}_modulated", [norm, *operands, scale, shift]
        else:
            norm = normed.func
            name, arguments = f"{kind}_norm", [norm, *operands]
        resolved = norms.recognised_norm(self._resolve(norm))
        kernel = "adaln" if name != "sum_norm" else resolved.kernel if resolved is not None else "rmsnorm"
        self._sums += 1
        place, result = body[index], f"{_KERNELS}_normed{self._sums}"
        call = self._call(name, [kernel], place, *arguments)
        both = ast.Tuple([ast.Name(target, ast.Store()), ast.Name(result, ast.Store())], ast.Store())
        body[index] = ast.fix_missing_locations(ast.copy_location(ast.Assign([both], call), place))
        body[user] = ast.fix_missing_locations(_Exchange(normed, ast.Name(result, ast.Load())).visit(body[user]))
        if not isinstance(body[user], ast.Return):  # else it would be in memory until the function returns
            free = ast.Assign([ast.Name(result, ast.Store())], ast.Constant(None))
            body.insert(user + 1, ast.fix_missing_locations(ast.copy_location(free, body[user])))

    def _norm_in(self, statement: ast.stmt, names: set[str], between: set[str]) -> Any:
        """Return a call in a statement that normalizes one of `names`, and that may be computed before it."""
        for node in _unconditional(statement):
            if self._norm_of(node) is not None and _is_one_of(node.args[0], names):
                return node
            if _kernel_of(node) == "modulated" and _is_one_of(node.args[1], names):
                later = set().union(*(_loaded(part) for part in node.args[2:]))
                return None if later & (between | names) else node
        return None


class _Substitution(ast.NodeTransformer):
    """Puts expressions in place of the reads of names."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class _Exchange(ast.NodeTransformer):
    """Puts an expression in place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else super().visit(node)


def _assigned(statement: ast.stmt) -> tuple[Optional[str], Any]:
    """Return the name that a statement assigns a value to, and the value."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def _has_norm(module: nn.Module) -> bool:
    return any(norms.recognised_norm(inner) is not None for inner in (module, *module._modules.values()) if inner)


def _is_in_place(node: ast.AST) -> bool:
    """Return whether a tensor may be changed in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.AugAssign)


def _is_plain(statement: ast.stmt) -> bool:
    """Return whether a statement computes and assigns, without conditions, and changes no tensor in place."""
    if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)):
        return False
    return not any(isinstance(node, (ast.NamedExpr, ast.Yield)) or _is_in_place(node) for node in ast.walk(statement))


def _has_docstring(node: ast.FunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _is_pure(node: ast.expr) -> bool:
    return not any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _unconditional(node: ast.AST) -> Iterator[ast.AST]:
    """Return the expressions in a statement that are computed each time, once."""
    yield node
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)):
        return
    for inner in ast.iter_child_nodes(node):
        yield from _unconditional(inner)


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _is_one_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_product(node: Any) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def _is_processor(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "processor"
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _is_cat(node: ast.Call) -> bool:
    """Return whether a call is `torch.cat` of two tensors along their tokens."""
    function, options = node.func, {keyword.arg: keyword.value for keyword in node.keywords}
    along = options.get("dim", node.args[1] if len(node.args) > 1 else None)
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "cat"
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and isinstance(along, ast.Constant)
        and along.value == 1
        and isinstance(node.args[0], (ast.List, ast.Tuple))
        and len(node.args[0].elts) == 2
        and not any(isinstance(part, ast.Starred) for part in node.args[0].elts)
    )


def _kernel_of(node: Any) -> Optional[str]:
    """Return the name of the function of this package that a rewritten expression calls."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.attr if node.func.value.id == _KERNELS else None
    return None


def _without_one(node: ast.expr) -> Optional[ast.expr]:
    """Return `scale` of `1 + scale`, or of a part of it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for one, scale in ((node.left, node.right), (node.right, node.left)):
            if isinstance(one, ast.Constant) and one.value == 1:
                return scale
    if isinstance(node, ast.Subscript):
        scale = _without_one(node.value)
        return None if scale is None else ast.copy_location(ast.Subscript(scale, node.slice, ast.Load()), node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze":
        scale = _without_one(node.func.value)
        if scale is not None:
            method = ast.copy_location(ast.Attribute(scale, "unsqueeze", ast.Load()), node.func)
            return ast.copy_location(ast.Call(method, node.args, node.keywords), node)
    return None


def _transposed_from(node: Any) -> tuple[Any, str]:
    """Return `x` of `x.transpose(1, 2)` or `x.view(...).transpose(1, 2)`, and whether that splits its heads."""
    changed = ""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        arguments = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
        if node.func.attr == "transpose" and arguments == [1, 2] and not changed:
            changed = "transposed"
        elif node.func.attr in ("view", "reshape") and changed == "transposed":
            changed = "split"
        else:
            break
        node = node.func.value
    return node, changed


def _constants(keywords: Sequence[ast.keyword]) -> Optional[dict[str, Any]]:
    if all(keyword.arg is not None and isinstance(keyword.value, ast.Constant) for keyword in keywords):
        return {str(keyword.arg): keyword.value.value for keyword in keywords}
    return None
