"""What the unknown conditions of a `setup.py` ask for; a usual Linux machine and new releases are assumed."""

from __future__ import annotations

import ast
from collections.abc import Sequence

# Conditions with one of these words are about machines that this builder does not compile for.
_ELSEWHERE = ("hip", "rocm", "win32", "windows", "'nt'", "darwin", "macos", "musa", "npu", "xpu", "mlu", "mps")
_NEGATIONS = (ast.NotEq, ast.IsNot, ast.NotIn)


def asks_for_special(test: ast.expr) -> bool:
    """Return whether a condition is about old versions, or about one value of many; new and usual ones are assumed."""
    match test:
        case ast.Compare():
            return isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Eq, ast.In))
        case ast.BoolOp():
            asked = [asks_for_special(operand) for operand in test.values]
            return any(asked) if isinstance(test.op, ast.And) else all(asked)
        case ast.UnaryOp(op=ast.Not()):
            return not asks_for_other_machines(test.operand)
    return False


def asks_for_other_machines(test: ast.expr) -> bool:
    """Return whether a condition holds only on machines that this builder does not compile for."""
    if isinstance(test, ast.BoolOp):
        asked = [asks_for_other_machines(operand) for operand in test.values]
        return any(asked) if isinstance(test.op, ast.And) else all(asked)
    if isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], _NEGATIONS)):
        return False
    return names_other_machines(ast.unparse(test))


def names_other_machines(words: str) -> bool:
    """Return whether the text of a condition has a word for machines that this builder does not compile for."""
    return any(word in words.lower() for word in _ELSEWHERE)


def only_stops(body: Sequence[ast.stmt]) -> bool:
    """Return whether a branch does nothing but end the script."""
    return all(isinstance(statement, ast.Raise) or "exit(" in ast.unparse(statement) for statement in body)
