ops = torch.ops.$namespace


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the qualified name of an operator of this kernel, for functions of `torch.library`."""
    return f"$namespace::{op_name}"
