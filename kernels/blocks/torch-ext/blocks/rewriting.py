"""Rewrites forwards: their own code, with calls of the kernels in place of the expressions that these compute.

A forward keeps all its other operations, and patches of users. Expressions are replaced whose norms,
activations and rotary functions `norms`, `gated` and `rotary` have recognized by their results:

- `act(gate) * up`,
- `norm(x) * (1 + scale) + shift`, also where a function of the module computes it of its arguments, and
  `x + gate * branch`, in the dtype of x, or in float32 and rounded at the end,
- `x + branch` with the `norm(x)` after it, with or without gates and modulations,
- calls of rotary functions, on all or some of the tokens, and with the norms of q and k before them,
- `torch.nn.GELU` after a projection, which fits into the epilogue of its matrix product,
- the attention masks of transformers in CUDA graphs, and copies that are not needed or slow the next operation down.

Steps that one kernel computes may be apart, under conditions, or in another method: the values between them are
`deferred`. Each call looks at its arguments, and computes the expression itself where the kernels cannot.
"""

import ast
import builtins
import copy
import functools
import importlib.util
import inspect
import itertools
import math
import sys
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Optional

from torch import nn

from . import deferred, gated, masks, norms, patterns, projections, rotary
from .function_code import KERNELS, compiled, methods_of, parsed, signature_of
from .patterns import MISSING, SCOPES
from .probes import _content, required_arguments

_GIVEN = "__blocks_given"  # the position ids that a forward was given
_Body = list[ast.stmt]

# Names of replacements for the report, by the function that is called instead, and the kernels.
_DOES = {
    "gated": ("activation of the gate, and the product", ("geglu",)),
    "modulated": ("norm with modulation", ("adaln",)),
    "rotated": ("rotary embedding", ("rope3d",)),
    "norm_rotated": ("q/k norm with rotary embedding", ("rope3d",)),
    "activated_projection": ("GELU in the epilogue of its projection", ()),
    "masked": ("causal attention without a mask in CUDA graphs", ()),
    "joined": ("tokens joined in their order in memory", ()),
    "divided": ("division by one left out", ()),
}
_FUNCTIONS = {
    name: value
    for module in (deferred, gated, masks, projections, rotary)
    for name, value in vars(module).items()
    if isinstance(value, FunctionType) and not name.startswith("_")
}


@dataclass
class Rewriting:
    """The result of rewriting a function.

    Attributes:
        function: The function rewritten, or None if it has nothing that the kernels compute.
        does: Its operations in kernels, each with their names.
        norms: The kernels of norms that it computes where their values are needed, if nothing else does.
        misses: Its operations that resemble the kernels', and the reasons against them.
    """

    function: Optional[FunctionType] = None
    does: dict[str, set[str]] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    misses: list[str] = field(default_factory=list)


def rewritten(function: Any, roots: dict[str, Any], processing: Optional[Rewriting] = None) -> Rewriting:
    """Rewrite a function.

    Args:
        function: A method, or `__call__` of an attention processor, without its decorators.
        roots: The values of its parameters: `self`, and the module that a processor is called with.
        processing: The replacement of the module's attention processor, or None.
    """
    node = parsed(function)
    if node is None or "locals" in function.__code__.co_names:
        return Rewriting(misses=["the source of its forward cannot be read"])
    rewriter = _Rewriter(function, roots, processing)
    node = copy.deepcopy(node)
    node.body = rewriter.rewrite(node.args, node.body)
    result = Rewriting(None, rewriter.does, rewriter.norms, rewriter.misses)
    if rewriter.does:
        kernels = SimpleNamespace(slice=slice, signature_of=signature_of, **_FUNCTIONS, **rewriter.constants)
        result.function = _while_same(rewriter.inlined, compiled(node, function, kernels), function)
        result.function.takes_deferred = rewriter.takes_deferred
    return result


def _while_same(inlined: dict[str, FunctionType], new: FunctionType, function: FunctionType) -> FunctionType:
    """Return a function that runs `new` as long as the functions are the same whose code is in it."""
    if not inlined:
        return new
    present = function.__globals__

    def either(*args: Any, **kwargs: Any) -> Any:
        if all(present.get(name) is value for name, value in inlined.items()):
            return new(*args, **kwargs)
        return function(*map(deferred.now, args), **kwargs)

    return either


_ANY = ""  # a target that takes every deferred value
_VIEWS = ("transpose", "view", "reshape", "unflatten")
_KNOWN_BEFORE = ("shape", "dtype", "device", "ndim")


class _Rewriter(ast.NodeTransformer):
    """Replaces known expressions by calls of this package.

    Names whose values may be deferred are read with `now`, except where this package gets them.
    """

    def __init__(self, function: FunctionType, roots: dict[str, Any], processing: Optional[Rewriting]) -> None:
        self._processing = processing
        self.does: dict[str, set[str]] = {}
        self.norms: set[str] = set()
        self.misses: list[str] = []
        self.constants: dict[str, Any] = {}
        self.inlined: dict[str, FunctionType] = {}
        self.takes_deferred = 0
        self._function = function
        self._roots = roots
        self._locals = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
        self._closure = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        self._made: dict[str, Any] = {}  # functions made or imported inside
        self._has_norm = self._takes_positions = False
        self._changes: list[tuple[int, int]] = []  # first and last lines where tensors may change
        self._last_line: dict[str, int] = {}  # where names are used last
        self._exposed: set[str] = set()  # names whose first values must not be deferred
        self._of_norms: set[Optional[str]] = set()  # names that are given a norm
        # Names, by their use: a norm, a modulation or rotary embedding, a sum, a product.
        self._normed: dict[str, list[tuple[int, nn.Module]]] = {}
        self._combined, self._added, self._multiplied = set(), set(), set()
        # Names that are given the product of a gate and a branch, an activation, and any deferred value.
        self._gated, self._activated, self._deferred = set(), set(), set()
        self._given: set[str] = set()  # deferred names that have a value where the rewriter is
        # By names: the first and last lines of the statements, outside of others, that assign them a value.
        self._assignments: dict[Optional[str], list[tuple[int, int]]] = {}

    def rewrite(self, arguments: ast.arguments, body: _Body) -> _Body:
        assigned = [patterns.assigned(node) for statement in body for node in patterns.outside_scopes(statement)]
        self._of_norms = {target for target, value in assigned if self._norm_of(value) is not None}
        body = [patterns.Inlined(self.inlined_of).visit(statement) for statement in body]
        for statement in body:
            target, _ = patterns.assigned(statement)
            self._assignments.setdefault(target, []).append((statement.lineno, statement.end_lineno))
        nodes = [node for statement in body for node in patterns.outside_scopes(statement)]
        for node in nodes:
            self._learn(node)
        called = [self._resolve(node.func) for node in nodes if isinstance(node, ast.Call)]
        self._has_norm = any(isinstance(value, nn.Module) and _has_norm(value) for value in called)
        self._find_exposed(body, nodes)
        for node in nodes:
            self._find_uses(node)
        self._find_deferred([argument.arg for argument in arguments.args], nodes)
        self._pair(body)
        self._takes_positions = masks.POSITIONS in [argument.arg for argument in arguments.args]
        body = [self.visit(statement) for statement in body]
        if _DOES["masked"][0] in self.does:  # the forward may give its parameter another value
            given = ast.Assign([ast.Name(_GIVEN, ast.Store())], ast.Name(masks.POSITIONS, ast.Load()))
            body.insert(0, ast.fix_missing_locations(ast.copy_location(given, body[0])))
        return body

    def _learn(self, node: ast.AST) -> None:
        """Keep functions that are imported or made inside, and are the same at each call."""
        learnt: dict[str, Any] = {}
        if isinstance(node, ast.ImportFrom):
            package = self._function.__globals__.get("__package__") or ""
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                learnt[alias.asname or alias.name] = getattr(sys.modules.get(name), alias.name, MISSING)
        elif isinstance(node, ast.FunctionDef):
            codes = [c for c in self._function.__code__.co_consts if isinstance(c, CodeType) and c.co_name == node.name]
            is_same = len(codes) == 1 and not (codes[0].co_freevars or node.decorator_list or node.args.defaults)
            if is_same and not node.args.kw_defaults:
                learnt[node.name] = FunctionType(codes[0], self._function.__globals__)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            choices = self._resolve(node.value.body), self._resolve(node.value.orelse)
            if all(map(masks.makes_mask, choices)):
                learnt.update(dict.fromkeys(patterns.stored(node), choices[0]))
        for name, value in learnt.items():
            self._made[name] = MISSING if name in self._made else value

    def inlined_of(self, node: ast.Call) -> Optional[ast.expr]:
        """Return the result of a function of the module for a call's arguments, if it modulates a norm of these."""
        function = self._resolve(node.func) if isinstance(node.func, ast.Name) else None
        if not isinstance(function, FunctionType) or function is not self._function.__globals__.get(node.func.id):
            return None
        given = dict(zip(function.__code__.co_varnames, node.args))
        given.update((str(keyword.arg), keyword.value) for keyword in node.keywords)
        if function.__code__.co_argcount != len(given) or any(isinstance(value, ast.Starred) for value in node.args):
            return None
        if sum(not patterns.is_pure(value) for value in given.values()) > 1:
            return None  # they are computed in another order
        definition = parsed(function)
        body = [] if definition is None else definition.body[ast.get_docstring(definition) is not None :]
        value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        if value is None or sorted(n.id for n in ast.walk(value) if isinstance(n, ast.Name)) != sorted(given):
            return None  # each argument is computed once
        value = copy.deepcopy(value)
        for inner in ast.walk(value):
            ast.copy_location(inner, node)
        value = patterns.Substitution(given).visit(value)
        if not any(
            self._norm_of(x) is not None or patterns.is_one_of(x, self._of_norms)
            for x, _, _ in patterns.modulations(value)
        ):
            return None
        self.inlined[node.func.id] = function
        return value

    def _find_exposed(self, body: _Body, nodes: list[ast.AST]) -> None:
        """Find the values between whose assignment and last use tensors may change, which must not be deferred."""
        loops = [(node.lineno, node.end_lineno) for node in nodes if isinstance(node, (ast.For, ast.While))]
        for node in nodes:
            if self._is_rotated_in_place(node):
                continue
            if isinstance(node, (ast.With, ast.Try)) or patterns.is_in_place(node) or self._is_module_in_place(node):
                around = [loop for loop in loops if loop[0] <= node.lineno <= loop[1]]
                self._changes.append(min([*around, (node.lineno, node.end_lineno)]))
        for node in nodes:
            if isinstance(node, ast.Name):
                self._last_line[node.id] = max(node.lineno, self._last_line.get(node.id, 0))
        self._exposed = {name for name in self._last_line if self._is_exposed(name, body, 0, (0, 0))}
        self._mark_deferrable(body, (math.inf, 0))

    def _is_module_in_place(self, node: ast.AST) -> bool:
        """Return whether a call is of a module like `SiLU(inplace=True)`, or of one with such a module inside."""
        module = self._resolve(node.func) if isinstance(node, ast.Call) else None
        return isinstance(module, nn.Module) and any(getattr(inner, "inplace", False) for inner in module.modules())

    def _mark_deferrable(self, body: _Body, loop: tuple[float, float]) -> None:
        for index, statement in enumerate(body):
            target, _ = patterns.assigned(statement)
            is_loop = isinstance(statement, (ast.For, ast.While)) and loop[1] == 0
            around = (statement.lineno, statement.end_lineno) if is_loop else loop
            if target is not None and not self._is_exposed(target, body[index + 1 :], statement.lineno, loop):
                statement.may_defer = True
            for name in () if isinstance(statement, SCOPES) else ("body", "orelse"):
                self._mark_deferrable(getattr(statement, name, []), around)

    def _is_exposed(self, name: str, later: _Body, line: int, loop: tuple[float, float]) -> bool:
        """Return whether tensors may change between a line that gives a name a value, and the last use of that."""
        ends = (s.end_lineno for s in later if isinstance(s, ast.Assign) and name in patterns.stored(s) and not loop[1])
        end = next(ends, None)
        first, last = (min(line, loop[0]), max(self._last_line[name], loop[1])) if end is None else (line, end)
        return any(first <= until and begin <= last for begin, until in self._changes)

    def _find_uses(self, node: ast.AST) -> None:
        if self._norm_of(node) is not None:
            x = patterns.widened(node.args[0]) or node.args[0]
            if isinstance(x, ast.Name):
                self._normed.setdefault(x.id, []).append((node.lineno, self._norm_of(node)))
        elif isinstance(node, ast.Call):
            rotates = self._rotary_of(node)
            if rotates is not None or patterns.is_cat(node):
                arguments = node.args[: rotates.tensors] if rotates is not None else node.args[0].elts
                self._combined |= {x.id for x in map(patterns.whole, arguments) if isinstance(x, ast.Name)}
            elif self._may_take_deferred(node.func):
                self._combined |= {x.id for x in node.args if isinstance(x, ast.Name)}
                for x in node.args:
                    if isinstance(x, ast.Name):
                        self._normed.setdefault(x.id, [])
            elif isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
                self._combined |= patterns.loaded(node.func.value) if isinstance(node.func.value, ast.Name) else set()
        elif isinstance(node, ast.BinOp):
            uses = {ast.Add: self._added, ast.Mult: self._multiplied}.get(type(node.op), set())
            uses.update(x.id for x in (node.left, node.right) if isinstance(x, ast.Name))
            self._combined |= {x.id for x, _, _ in patterns.modulations(node) if isinstance(x, ast.Name)}

    def _find_deferred(self, parameters: list[str], nodes: list[ast.AST]) -> None:
        """Find the names whose values may be deferred."""
        free = [patterns.assigned(node) for node in nodes if hasattr(node, "may_defer")]
        for target, value in free:
            self._activated |= {target} if self._activation_of(value) is not None else set()
        for target, value in free:
            self._gated |= {target} if self._is_gated(value) and not self._is_activated(value) else set()
            if isinstance(value, ast.Name):  # another name of the same value
                for uses in (self._combined, self._added):
                    uses.update({value.id} if target in uses else ())
                for name, other in ((target, value.id), (value.id, target)):
                    if name in self._normed:
                        self._normed.setdefault(other, self._normed[name])
        captured = {*self._function.__code__.co_cellvars, *self._roots}
        captured |= set().union(*(patterns.loaded(node) for node in nodes if isinstance(node, SCOPES)))
        modulated = {x.id for n in nodes for x, _, _ in patterns.modulations(n) if isinstance(x, ast.Name)}
        used = self._normed.keys() | modulated
        # Only `called` passes deferred values, to methods of models, as their first arguments.
        given = parameters[1:] if len(self._roots) == 1 else []
        self._deferred = {*itertools.takewhile(lambda name: name in used - captured - self._exposed, given)}
        self.takes_deferred, self._given = len(self._deferred), {*self._deferred}
        new = True
        while new:
            new = {t for t, value in free if t not in captured and self._is_deferred(value, t)} - self._deferred
            self._deferred |= new

    def _is_deferred(self, value: ast.expr, target: str) -> bool:
        before = dict(self.constants), list(self.misses), {operation: set(by) for operation, by in self.does.items()}
        deferred = self._deferring(copy.deepcopy(value), target)
        self.constants, self.misses, self.does = before
        return deferred is not None

    # --- statements ---

    def _pair(self, body: Any) -> None:
        """Join the statements that rotate q and then k alike: one kernel computes both."""
        for index in range(len(body) - 2, -1, -1):
            (first, x), (second, y) = map(patterns.assigned, body[index : index + 2])
            of_x, of_y = self._rotated_name(x), self._rotated_name(y)
            if None in (first, second, of_x, of_y) or first == second or first in patterns.loaded(y):
                continue
            alike = patterns.Substitution({of_y: ast.Name(of_x, ast.Load())}).visit(copy.deepcopy(y))
            if ast.dump(alike) == ast.dump(x):
                x.both = [ast.copy_location(ast.Name(name, ast.Load()), x) for name in (of_x, of_y)]
                targets = ast.Tuple([ast.Name(name, ast.Store()) for name in (first, second)], ast.Store())
                both = ast.copy_location(ast.Assign([targets], x), body[index])
                body[index : index + 2] = [ast.fix_missing_locations(both)]

    def _rotated_name(self, value: Any) -> Optional[str]:
        """Return the name that an expression rotates, if that is all it does."""
        call = self._rotated_part_of(value) or value
        rotates = self._rotary_of(call)
        x = patterns.whole(call.args[0]) if rotates is not None and rotates.tensors == 1 else None
        return x.id if isinstance(x, ast.Name) else None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                self._pair(inner)
        return super().generic_visit(node)

    # Functions and classes inside have names of their own.
    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    visit_ClassDef = visit_ListComp = visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_Lambda
    visit_With = visit_Lambda  # which may begin a region without kernels, such as autocast

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        made = self._made.get(node.name, MISSING)
        if made is not MISSING and rotary.is_candidate(made):
            name = ast.Name(node.name, ast.Store())
            return ast.fix_missing_locations(ast.copy_location(ast.Assign([name], self._constant(made)), node))
        if rotary.gets_tables([argument.arg for argument in node.args.args]):
            self.misses.append(f"{node.name} is a new function at each call, so its results are unknown")
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if self._is_rotated_in_place(node):
            place, call = node.targets[0], node.value
            part = self.visit(place.value), patterns.index(place.slice)
            arguments = self._constant(self._rotary_of(call)), call.func, *part, *map(self.visit, call.args[1:])
            new = self._call("rotate_part", node, *arguments, keywords=call.keywords, does="rotated")
            return ast.copy_location(ast.Expr(new), node)
        target, value = patterns.assigned(node)
        may_defer = target in self._deferred and hasattr(node, "may_defer")
        new = self._deferring(value, target) if may_defer else None
        if new is None:
            return self.generic_visit(node)
        node.value = new
        self._given.add(target)
        return node

    def _is_rotated_in_place(self, node: ast.AST) -> bool:
        """Return whether a statement is `x[part] = rotate(x[part], ...)`."""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return getattr(node, "is_rotated", False)
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)):
            return False
        rotates, place = self._rotary_of(node.value), node.targets[0]
        if rotates is None or rotates.tensors != 1 or not isinstance(place.value, ast.Name):
            return False
        place.is_rotated = (
            ast.unparse(place) == ast.unparse(node.value.args[0]) and patterns.index(place.slice) is not None
        )
        return place.is_rotated

    # --- values of names ---

    def _resolve(self, node: ast.AST) -> Any:
        """Return an expression's value while the function runs, if it is the same each time."""
        if isinstance(node, ast.Name):
            if node.id in self._roots:
                return self._roots[node.id]
            if node.id in self._locals:
                return self._made.get(node.id, MISSING)
            if node.id in self._closure:
                return _content(self._closure[node.id])
            return self._function.__globals__.get(node.id, getattr(builtins, node.id, MISSING))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, index = self._resolve(node.value), node.slice.value
            is_there = isinstance(owner, nn.ModuleList) and type(index) is int and -len(owner) <= index < len(owner)
            return owner[index] if is_there else MISSING
        if not isinstance(node, ast.Attribute):
            return MISSING
        owner = self._resolve(node.value)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, MISSING)
        is_known = isinstance(owner, nn.Module) or any(owner is root for root in self._roots.values())
        is_computed = isinstance(inspect.getattr_static(type(owner), node.attr, None), property)
        return getattr(owner, node.attr, MISSING) if is_known and not is_computed else MISSING

    def _norm_of(self, node: ast.AST) -> Optional[nn.Module]:
        """Return the norm that a call is of, with nothing but its input."""
        norm = self._resolve(node.func) if patterns.has_one_argument(node) and not node.keywords else None
        return norm if isinstance(norm, nn.Module) and norms.recognized_norm(norm) is not None else None

    def _activation_of(self, node: ast.AST) -> Optional[ast.expr]:
        """Return the activation that a call is of, with nothing but its input."""
        activation = self._resolve(node.func) if patterns.has_one_argument(node) else MISSING
        if activation is MISSING or (isinstance(activation, nn.Module) and activation._modules):
            return None
        if not node.keywords:
            return node.func if gated.activation_of(activation) is not None else None
        options = {keyword.arg: patterns.literal(keyword.value) for keyword in node.keywords}
        is_known = None not in options and MISSING not in options.values()
        if not is_known or not isinstance(activation, (FunctionType, BuiltinFunctionType)):
            return None
        partial = functools.partial(activation, **options)
        return self._constant(partial) if gated.activation_of(partial) is not None else None

    def _constant(self, value: Any) -> ast.expr:
        name = f"constant{len(self.constants)}"
        self.constants[name] = value
        return ast.Attribute(ast.Name(KERNELS, ast.Load()), name, ast.Load())

    def _call(self, name: str, node: ast.AST, *arguments: ast.expr, keywords: Any = (), does: str = "") -> ast.expr:
        if does:
            words, kernels = _DOES[does]
            self.does.setdefault(words, set()).update(kernels)
        function = ast.Attribute(ast.Name(KERNELS, ast.Load()), name, ast.Load())
        call = ast.Call(function, list(arguments), [self.visit(keyword) for keyword in keywords])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def _may_take_deferred(self, function: ast.expr) -> bool:
        """Return whether a call may be of a rewritten method or forward that norms or modulates its argument."""
        value = self._resolve(function)
        if isinstance(value, nn.Module):
            return norms.recognized_norm(value) is None and _has_norm(value) and bool(methods_of(type(value)))
        return isinstance(value, MethodType) and any(value.__self__ is root for root in self._roots.values())

    # --- expressions ---

    def visit(self, node: ast.AST) -> Any:
        new = self._deferring(node) if isinstance(node, ast.expr) else None
        return super().visit(node) if new is None else self._call("now", node, new)

    def _deferring(self, node: Any, target: Optional[str] = None) -> Optional[ast.expr]:
        """Return the replacement of an expression whose value may be deferred; None for any other.

        Args:
            target: The name that is given the value, `_ANY`, or None.
        """

        def is_in(uses: Any) -> bool:
            return target is not None and (target == _ANY or target in uses)

        if isinstance(node, ast.Name):
            return node if node.id in self._deferred and isinstance(node.ctx, ast.Load) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._modulated(node) or self._sum(node, target, is_in(self._normed))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if is_in(self._added) and self._is_gated(node) and not self._is_activated(node):
                return self._call("times", node, self._operand(node.left), self._operand(node.right))
            return None
        if not isinstance(node, ast.Call):
            return None
        if self._norm_of(node) is not None:
            x = patterns.widened(node.args[0]) or node.args[0]
            is_used = is_in(self._combined) or (isinstance(x, ast.Name) and x.id in self._deferred)
            if not is_used:
                return None
            self.norms.add(norms.recognized_norm(self._norm_of(node)).kernel)
            return self._call("normed", node, node.func, self._operand(node.args[0]))
        if self._activation_of(node) is not None:
            return self._begun(node) if target and is_in(self._multiplied) else None
        is_processor = len(self._roots) == 2
        if (
            patterns.is_cat(node)
            and not self._changes
            and (self._has_norm or is_processor)
            and not self._rotated_part_of(node)
        ):
            parts, dim = node.args[0].elts, patterns.dim_of(node)
            if any(self._deferring(part) is None for part in parts):
                if dim != 1 and not is_processor:
                    return None
                self.does.setdefault(_DOES["joined"][0], set())
            return self._call("joined", node, ast.List([*map(self._operand, parts)], ast.Load()), ast.Constant(dim))
        if isinstance(node.func, ast.Attribute) and not node.keywords:
            of_norm = target if is_in(self._combined) else None
            if node.func.attr in _VIEWS:
                x = self._deferring(node.func.value, of_norm)
                if x is not None and not any(isinstance(argument, ast.Starred) for argument in node.args):
                    return self._call("viewed", node, x, ast.Constant(node.func.attr), *map(self.visit, node.args))
            if node.func.attr == "type_as" and len(node.args) == 1 and self._has_norm:
                x = self._deferring(node.func.value, _ANY)
                return None if x is None else self._call("like_type", node, x, self._operand(node.args[0]))
        return None

    def _operand(self, node: ast.expr) -> ast.expr:
        """Return an expression that a function of this package gets."""
        x = patterns.widened(node)
        if x is not None and self._has_norm:
            return self._call("wide", node, self._operand(x))
        new = self._deferring(node)
        return self.visit(node) if new is None else new

    def _modulated(self, node: ast.BinOp) -> Optional[ast.expr]:
        for normed, scale, shift in patterns.modulations(node):
            if isinstance(normed, ast.Name) and normed.id in self._deferred:
                x = normed
            elif self._norm_of(normed) is not None:
                x = self._call("normed", normed, normed.func, self._operand(normed.args[0]))
            else:
                continue
            return self._call("modulated", node, x, self.visit(scale), self.visit(shift), does="modulated")
        return None

    def _sum(self, node: ast.BinOp, target: Optional[str], is_normed: bool) -> Optional[ast.expr]:
        parts = node.left, node.right
        if not self._has_norm or any(map(self._is_number, parts)):
            return None
        gates = [x for x in parts if self._is_gated(x) and not self._is_activated(x)]
        with_gate = len(gates) == 1 or any(isinstance(x, ast.Name) and x.id in self._gated for x in parts)
        if not (with_gate or is_normed) or len(gates) > 1:
            return None
        operands = [
            self._call("times", x, self._operand(x.left), self._operand(x.right)) if x in gates else self._operand(x)
            for x in parts
        ]
        last = min((end for start, end in self._assignments.get(target, ()) if start > node.lineno), default=math.inf)
        later = [norm for line, norm in self._normed.get(target or "", ()) if node.lineno < line <= last]
        if with_gate or later:
            more = ["gate"] * with_gate + ["norm"] * bool(later)
            kinds = {"adaln"} if with_gate else {norms.recognized_norm(norm).kernel for norm in later}
            self.does.setdefault(f"residual sum with {' and '.join(more)}", set()).update(kinds)
        return self._call("total", node, *operands)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_known = node.attr in _KNOWN_BEFORE and isinstance(node.value, ast.Name)
        return node if is_known else self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            sides = [(node.left, node.right, "gated"), (node.right, node.left, "gated_reversed")]
            # A name may be given an activation whose product with something else is meant.
            for activated, up, name in sorted(sides, key=lambda side: isinstance(side[0], ast.Name)):
                if isinstance(activated, ast.Name) and activated.id in self._deferred & self._activated:
                    begun = activated
                elif self._activation_of(activated) is not None:
                    begun = self._begun(activated)
                else:
                    self._miss_activation(activated)
                    continue
                parts = [begun, self.visit(up)]
                return self._call(name, node, *(parts if name == "gated" else parts[::-1]), does="gated")
        divisor = self._resolve(node.right) if isinstance(node.right, ast.Attribute) else None
        if isinstance(node.op, ast.Div) and not self._changes and type(divisor) in (int, float) and divisor == 1:
            return self._call("divided", node, self.visit(node.left), node.right, does="divided")
        return self.generic_visit(node)

    def _begun(self, call: Any) -> ast.expr:
        return self._call("begun", call, self._activation_of(call), self.visit(call.args[0]))

    def _is_activated(self, node: Any) -> bool:
        """Return whether a product is that of an activation and its gated value."""
        return any(
            self._activation_of(x) is not None or (isinstance(x, ast.Name) and x.id in self._activated)
            for x in (node.left, node.right)
        )

    def _miss_activation(self, node: ast.AST) -> None:
        activation = self._resolve(node.func) if patterns.has_one_argument(node) else None
        if isinstance(activation, nn.Module):
            inner = activation._modules or activation._parameters or norms.recognized_norm(activation) is not None
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
        if not patterns.is_product(node) or self._is_number(node.left) or self._is_number(node.right):
            return False
        return patterns.without_one(node.left) is None and patterns.without_one(node.right) is None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._processing is not None and patterns.is_processor(node.func):
            for operation, kernels in self._processing.does.items():
                self.does.setdefault(operation, set()).update(kernels)
            self.norms |= self._processing.norms
            self.generic_visit(node)
            return ast.Call(self._constant(self._processing.function), [node.func, *node.args], node.keywords)
        function = self._resolve(node.func)
        if self._takes_positions and masks.makes_mask(function):
            arguments = node.func, ast.Name(_GIVEN, ast.Load()), *map(self.visit, node.args)
            return self._call("masked", node, *arguments, keywords=node.keywords, does="masked")
        if function is inspect.signature and len(node.args) == 1 and not node.keywords:
            return self._call("signature_of", node, *node.args)
        inner = self._rotated_part_of(node)
        call = self._rotary_of(node if inner is None else inner)
        if call is not None:
            return self._rotated(node, inner or node, call)
        if self._may_take_deferred(node.func) and any(self._deferring(x) is not None for x in node.args):
            return self._call("called", node, node.func, *map(self._operand, node.args), keywords=node.keywords)
        projected = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if self._fits_epilogue(node.func, projected):
            parts = node.func, projected.func, self.visit(projected.args[0])
            return self._call("activated_projection", node, *parts, does="activated_projection")
        return self.generic_visit(node)

    def _fits_epilogue(self, function: ast.expr, projected: Any) -> bool:
        """Return whether a call is of a GELU with the tanh approximation, of a projection."""
        if not (projections.HAS_EPILOGUE and isinstance(projected, ast.Call) and len(projected.args) == 1):
            return False
        activation = self._resolve(function)
        is_linear = isinstance(self._resolve(projected.func), nn.Linear)
        return is_linear and activation is not MISSING and gated.activation_of(activation) == "tanh"

    def _rotated(self, node: ast.Call, inner: ast.Call, call: rotary.RotaryCall) -> ast.expr:
        both, rest = getattr(node, "both", None), inner.args[call.tensors :]
        xs = both or [patterns.whole(x) if inner is not node else x for x in inner.args[: call.tensors]]
        later = self._deferred - self._given  # these names are given deferred values after this
        is_normed = any(
            self._deferring(copy.deepcopy(x), _ANY) is not None and not patterns.is_one_of(x, later) for x in xs
        )
        operands = [self._deferring(x, _ANY) or self.visit(x) for x in xs]
        arguments = [self._constant(call), inner.func, ast.Tuple(operands, ast.Load())]
        name = "rotated"
        if inner is not node:
            name = "rotated_part"
            indexes = [patterns.index(part.slice) for part in (inner.args[0], node.args[0].elts[1])]
            arguments += [ast.Tuple(indexes, ast.Load()), ast.Constant(patterns.dim_of(node))]
        does = "norm_rotated" if is_normed else "rotated"
        return self._call(name, node, *arguments, *map(self.visit, rest), keywords=inner.keywords, does=does)

    def _rotated_part_of(self, node: Any) -> Optional[ast.Call]:
        """Return the rotary call in `torch.cat([rotate(x[part], ...), x[other part]], dim)`."""
        if not (isinstance(node, ast.Call) and patterns.is_cat(node)):
            return None
        first, second = node.args[0].elts
        rotates = self._rotary_of(first)
        if rotates is None or rotates.tensors != 1:
            return None
        names = {ast.unparse(x.value) for x in (first.args[0], second) if isinstance(x, ast.Subscript)}
        if len(names) != 1 or not all(isinstance(x, ast.Subscript) for x in (first.args[0], second)):
            return None
        return None if None in (patterns.index(first.args[0].slice), patterns.index(second.slice)) else first

    def _rotary_of(self, node: Any) -> Optional[rotary.RotaryCall]:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            return None
        starred = [isinstance(argument, ast.Starred) for argument in node.args]
        function = self._resolve(node.func)
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        # A table may be given by name: its value does not change the function's formula.
        options = {
            name: patterns.literal(value)
            for name, value in named.items()
            if name and patterns.literal(value) is not MISSING
        }
        if None in named or function is MISSING or True in starred[:-1] or len(node.args) + len(named) < 2:
            return None
        given = len(node.args) + len(named) - len(options)
        if True in starred:  # the tables
            given = len(required_arguments(function) or ())
        call = rotary.recognized_rotary(function, given, options)
        if call is None and rotary.is_candidate(function):
            self.misses.append(f"{node.func.id} computes no rotary embedding that a kernel does")
        return call


def _has_norm(module: nn.Module) -> bool:
    return any(norms.recognized_norm(inner) is not None for inner in (module, *module._modules.values()) if inner)
