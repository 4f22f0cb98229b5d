"""Whether the fakes of ops take the arguments of their schemas, with which `torch.compile` calls them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernel_builder.checks.findings import Finding
from kernel_builder.checks.python_files import Source
from kernel_builder.plural import counted


def compare(name: str, sources: Sequence[Source], ops: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield the fakes that cannot be called with the arguments of a registered op.

    Ops with keyword-only arguments are left out, and so are fakes with variable arguments.
    """
    arguments = {op["name"]: op["arguments"] for op in ops if op["arguments"] is not None}
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.FunctionDef) or node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
                continue
            for op in filter(None, map(_of_fake, node.decorator_list)):
                if op not in arguments:
                    continue
                wanted = arguments[op]
                taken = len(node.args.posonlyargs) + len(node.args.args)
                if not taken - len(node.args.defaults) <= wanted <= taken:
                    yield Finding(
                        name,
                        source.name,
                        f"line {node.lineno}: the fake of {op} takes {counted(taken, 'argument')}, and its schema has "
                        f"{wanted}",
                        "take those of the schema: torch.compile calls the fake with them",
                        "warning",
                    )


def _of_fake(decorator: ast.expr) -> str:
    """Return the op whose fake is decorated; empty for other decorators."""
    match decorator:
        case ast.Call(
            func=ast.Attribute(attr="register_fake") | ast.Name(id="register_fake"),
            args=[ast.Call(args=[ast.Constant(value=str(op))]), *_],
        ):
            return op
    return ""
