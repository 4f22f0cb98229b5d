from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import tvm_ffi

has_jax = find_spec("jax") is not None and find_spec("jax_tvm_ffi") is not None
has_torch = find_spec("torch") is not None

ops = tvm_ffi.load_module(Path(__file__).parent / "$namespace.so")


def torch_add_op_namespace_prefix(op_name: str) -> str:
    """Return the qualified name of an operator of this kernel, for functions of `torch.library`."""
    return f"$namespace::{op_name}"


def jax_add_ffi_target_name_prefix(name: str) -> str:
    """Return the name of a function of this kernel as a target of JAX's foreign function interface."""
    return f"$namespace.{name}"


def jax_register_ffi_target(name: str, *args, **kwargs):
    """Register a function with JAX under a name that is unique to this build; do nothing without JAX."""
    if has_jax:
        return import_module("jax_tvm_ffi").register_ffi_target(jax_add_ffi_target_name_prefix(name), *args, **kwargs)


def jax_ffi_call(name: str, *args, **kwargs):
    """Return `jax.ffi.ffi_call` for a function that `jax_register_ffi_target` has registered."""
    if not has_jax:
        raise RuntimeError("jax and jax_tvm_ffi are not installed")
    return import_module("jax.ffi").ffi_call(jax_add_ffi_target_name_prefix(name), *args, **kwargs)
