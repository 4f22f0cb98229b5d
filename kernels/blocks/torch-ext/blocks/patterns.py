"""Forms of expressions and statements, independent of the objects that their names refer to."""

import ast
from collections.abc import Callable, Iterator
from typing import Any, Optional

from .function_code import KERNELS

MISSING = object()
SCOPES = (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.FunctionDef, ast.ClassDef)


class Substitution(ast.NodeTransformer):
    """Puts expressions in place of the reads of names."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class Inlined(ast.NodeTransformer):
    """Puts expressions in place of calls of which `inlined_of` knows one."""

    def __init__(self, inlined_of: Callable[[ast.Call], Optional[ast.expr]]) -> None:
        self._inlined_of = inlined_of

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._inlined_of(node) or self.generic_visit(node)


def outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """Return a statement and its parts, without the bodies of functions and comprehensions."""
    yield node
    if not isinstance(node, SCOPES):
        for inner in ast.iter_child_nodes(node):
            yield from outside_scopes(inner)


def whole(node: ast.expr) -> ast.expr:
    """Return `x` of `x[...]`."""
    return node.value if isinstance(node, ast.Subscript) else node


def widened(node: Any) -> Optional[ast.expr]:
    """Return `x` of `x.float()`."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not (node.args or node.keywords)
    return node.func.value if is_call and node.func.attr == "float" else None


def modulations(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """Return the value that an expression modulates, the scale, and the shift."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for product, shift in ((node.left, node.right), (node.right, node.left)):
            pairs = ((product.left, product.right), (product.right, product.left)) if is_product(product) else ()
            for x, factor in pairs:
                scale = without_one(factor)
                if scale is not None:
                    yield x, scale, shift


def index(node: ast.expr) -> Optional[ast.expr]:
    """Return an index of slices as a tuple, if it is one."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    if not all(isinstance(part, ast.Slice) for part in parts):
        return None
    none = ast.Constant(None)
    function = ast.Attribute(ast.Name(KERNELS, ast.Load()), "slice", ast.Load())
    slices = [ast.Call(function, [x or none for x in (part.lower, part.upper, part.step)], []) for part in parts]
    return ast.fix_missing_locations(ast.copy_location(ast.Tuple(slices, ast.Load()), node))


def assigned(statement: ast.stmt) -> tuple[Optional[str], Any]:
    """Return the name that a statement assigns a value to, and the value."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def is_in_place(node: ast.AST) -> bool:
    """Return whether a tensor may be changed in place."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_named = name.endswith("_") and not name.endswith("__")
        given = {keyword.arg for keyword in node.keywords if getattr(keyword.value, "value", True) is not False}
        return is_named or bool(given & {"inplace", "out"})
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.AugAssign)


def loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}


def stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def is_pure(node: ast.expr) -> bool:
    return not any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def has_one_argument(node: ast.AST) -> bool:
    """Return whether an expression is a call with one argument, and perhaps others by name."""
    return isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)


def is_one_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def is_product(node: Any) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def is_processor(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "self.processor"


def is_cat(node: ast.Call) -> bool:
    """Return whether a call is `torch.cat` of two tensors along a dimension in the middle."""
    return (
        ast.unparse(node.func) == "torch.cat"
        and dim_of(node) in (1, 2)
        and isinstance(node.args[0], (ast.List, ast.Tuple))
        and len(node.args[0].elts) == 2
        and not any(isinstance(part, ast.Starred) for part in node.args[0].elts)
    )


def dim_of(node: ast.Call) -> Any:
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    dim = options.get("dim", node.args[1] if len(node.args) > 1 else None)
    return dim.value if isinstance(dim, ast.Constant) and node.args else None


def without_one(node: ast.expr) -> Optional[ast.expr]:
    """Return `scale` of `1 + scale`, or of a part of it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for constant, scale in ((node.left, node.right), (node.right, node.left)):
            if isinstance(constant, ast.Constant) and constant.value == 1:
                return scale
    if isinstance(node, ast.Subscript):
        scale = without_one(node.value)
        return None if scale is None else ast.copy_location(ast.Subscript(scale, node.slice, ast.Load()), node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze":
        scale = without_one(node.func.value)
        if scale is not None:
            method = ast.copy_location(ast.Attribute(scale, "unsqueeze", ast.Load()), node.func)
            return ast.copy_location(ast.Call(method, node.args, node.keywords), node)
    return None


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return MISSING
