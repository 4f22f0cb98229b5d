import torch

from . import $namespace

ops = torch.ops.$namespace


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the qualified name of an operator of this kernel, as `torch.library` wants it."""
    return f"$namespace::{op_name}"
