"""The module in place of the author's: its launch functions call the ops."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence

from kernel_aot.ops import Op, Output
from kernel_format.errors import ConfigError

_HEAD = """{doc}

from __future__ import annotations

import torch

from {dots}_ops import add_op_namespace_prefix, ops


def _refuse(*arguments: object, **options: object) -> None:
    raise NotImplementedError("these kernels are for GPUs, and the tensors are on the CPU: move them to the GPU")
"""
_FUNCTIONS = {
    "cdiv": "def cdiv(a: int, b: int) -> int:\n    return -(-a // b)\n",
    "next_power_of_2": "def next_power_of_2(n: int) -> int:\n    return 1 << (n - 1).bit_length() if n > 0 else 0\n",
}


def module(ops: Sequence[Op], text: str, source: str, depth: int) -> str:
    """Return the text of the module.

    Args:
        text: The author's module.
        source: Its name, for the docstring and errors.
        depth: The number of packages that it is in.
    """
    tree = ast.parse(text)
    declared = {op.name for op in ops}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        decorators = " ".join(map(ast.unparse, node.decorator_list)) if isinstance(node, ast.FunctionDef) else ""
        kept = "jit" in decorators or "cute.kernel" in decorators
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not kept and node.name not in declared:
            raise ConfigError(
                f"{node.name} is neither a kernel nor an op of aot.toml, and binary packages have no such module",
                where=f"{source}:{node.lineno}",
                hint="move it into another module of the package, or declare it",
            )
    doc = (ast.get_docstring(tree) or "Launch functions.").strip()
    doc += f"\n\nkernel-builder made this module of {source}, whose kernels are in the library."
    parts = [_HEAD.format(doc=_docstring(doc), dots="." * depth)]
    expressions = " ".join(size.python for op in ops for output in op.outputs for size in output.sizes)
    parts += [text for name, text in _FUNCTIONS.items() if name in expressions]
    # A call of the overload takes the host 0.2 us less than one of ops.NAME.
    parts.append("\n".join(f"_{op.name} = ops.{op.name}.default" for op in ops) + "\n")
    for op in ops:
        author, names = functions.get(op.name), [parameter.name for parameter in op.parameters]
        if author and (own := [each.arg for each in (*author.args.args, *author.args.kwonlyargs)]) != names:
            raise ConfigError(
                f"{op.name} has the parameters {', '.join(own)}, and its schema has {', '.join(names)}",
                where=f"{source}:{author.lineno}",
                hint="write the schema with the function's parameters",
            )
        parts.append(_function(op, author))
        parts.append(_fake(op))
    return "\n\n".join(parts)


def _function(op: Op, author: ast.FunctionDef | None) -> str:
    names = ", ".join(parameter.name for parameter in op.parameters)
    signature, doc = f"({_parameters(op)})", ""
    if author:
        returns = f" -> {ast.unparse(author.returns)}" if author.returns else ""
        signature = f"({ast.unparse(author.args)}){returns}"
        doc = ast.get_docstring(author) or ""
    lines = [_docstring(doc)] if doc else []
    lines.append(f"return _{op.name}({names})")
    return f"def {op.name}{signature}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def _docstring(text: str) -> str:
    """Return a docstring as code, which the author's text cannot end."""
    quoted = text.replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{quoted}' + ("\n" if "\n" in text or text.endswith('"') else "") + '"""'


def _parameters(op: Op) -> str:
    kinds = {"Tensor": "torch.Tensor"}
    defaults = {p.name: f" = {p.default}" for p in op.parameters if p.default}
    return ", ".join(f"{p.name}: {kinds.get(p.kind, p.kind)}{defaults.get(p.name, '')}" for p in op.parameters)


def _fake(op: Op) -> str:
    lines = [
        f'torch.library.impl(add_op_namespace_prefix("{op.name}"), "CPU")(_refuse)',
        "",
        "",
        f'@torch.library.register_fake(add_op_namespace_prefix("{op.name}"))',
        f"def _fake_{op.name}({_parameters(op)}):",
        *(f"    {output.name} = {_allocation(output, op.first_tensor)}" for output in op.outputs),
    ]
    names = [output.name for output in op.outputs]
    lines += [f"    return {', '.join(names)}" if names else "    return None"]
    return "\n".join(lines) + "\n"


def _allocation(output: Output, first: str) -> str:
    kind = "zeros" if output.zeros else "empty"
    options = [f"dtype={'' if '.' in output.dtype.python else 'torch.'}{output.dtype.python}"] if output.dtype else []
    if output.like:
        return f"torch.{kind}_like({', '.join([output.like, *options])})"
    sizes = " ".join(f"{size.python}," for size in output.sizes)
    return f"torch.{kind}(({sizes}), {', '.join([*options, f'device={first}.device'])})"
