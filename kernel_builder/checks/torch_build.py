"""The back end and release that this machine's Torch was compiled for, without importing it, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kernel_builder.config.variant import Variant, this_platform


def may_load(variant: Variant) -> bool:
    """Return whether a variant is for this machine's platform and for a back end that its Torch does not lack.

    The client decides about the rest.
    """
    is_lacking = torch_versions().get(variant.backend.torch_version, "not stated") is None
    return variant.platform in (None, this_platform()) and not is_lacking


@cache
def torch_versions() -> Mapping[str, object]:
    """Return the values of `torch.version`, such as `cuda`, read from its file; none without Torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return {}
    values: dict[str, object] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(value)):
                values[name] = value
            case ast.AnnAssign(ast.Name(name), _, ast.Constant(value)):
                values[name] = value
    return values
