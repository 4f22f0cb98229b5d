"""Calls of attention without masks and copies that it does not need.

A causal mask that a graph makes of constants is left to the attention, and so are keys and values that are copied for
each head of the query. Where transformers may not look at position ids, as in a trace, it makes a mask in case these
are of several texts.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .editing import Editor, fits
from .matching import argument, changes, is_tensor, operation, shape_of, value

_RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "multinomial", "dropout"}
_LONGEST = 1000  # operations that make a mask


def drop_causal_mask(editor: Editor, node: Node) -> None:
    """Call attention without a mask, if its mask is that of causal attention over the same tokens."""
    if operation(node) != "scaled_dot_product_attention":
        return
    mask = argument(node, 3, "attn_mask")
    if not is_tensor(mask) or argument(node, 5, "is_causal", False):
        return
    query, key = node.args[:2] if len(node.args) > 1 else (node.kwargs.get("query"), node.kwargs.get("key"))
    shape = shape_of(query)[-2], shape_of(key)[-2]
    if shape[0] != shape[1]:
        return
    if mask not in editor.causal:  # a mask of many tokens is large, and all layers have the same
        editor.causal[mask] = _is_causal(constant(mask), shape[0])
    if not editor.causal[mask]:
        return
    _call_with(node, attn_mask=None, is_causal=True)
    editor.erase_unused(mask)


def group_heads(editor: Editor, node: Node) -> None:
    """Call attention with keys and values as they are, if they are copied for each head of the query.

    With a mask, and in float32 or before capability 8.0 on CUDA, Torch would choose an attention that keeps all scores.
    """
    is_attention = operation(node) == "scaled_dot_product_attention"
    if not is_attention or argument(node, 3, "attn_mask") is not None or node.kwargs.get("enable_gqa"):
        return
    query, *copies = (argument(node, index, name) for index, name in enumerate(_NAMES[:3]))
    memory = [unrepeated(copy) for copy in copies]
    if any(part is copy for part, copy in zip(memory, copies)) or not editor.may_join(copies, node):
        return
    if not fits(query) or (value(query).is_cuda and not _is_fused(value(query))):
        return
    _call_with(node, **dict(zip(_NAMES[1:], memory)), enable_gqa=True)
    for copy in copies:
        editor.erase_unused(copy)


def _is_fused(query: Tensor) -> bool:
    is_new = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return is_new and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256


def unrepeated(states: Any) -> Any:
    """Return the keys or values of which transformers makes one for each head of the query."""
    if operation(states) == "reshape" and operation(states.args[0]) == "expand":
        inner = states.args[0].args[0]
        is_added = operation(inner) == "getitem" and value(inner).dim() == 5 and value(inner).shape[2] == 1
        return inner.args[0] if is_added and value(states).dim() == 4 else states
    return states


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _call_with(node: Node, **changed: Any) -> None:
    node.kwargs = {**node.kwargs, **dict(zip(_NAMES, node.args)), **changed}
    node.args = ()


def _is_causal(mask: Optional[Tensor], tokens: Any) -> bool:
    if mask is None or mask.dtype != torch.bool or mask.shape[-2:] != (tokens, tokens):
        return False
    return bool((mask == mask.new_ones(tokens, tokens).tril()).all())


def constant(node: Node) -> Optional[Tensor]:
    """Return the value of a node that depends on constants alone; None for any other node."""
    order: dict[Node, None] = {}
    pending = [node]
    while pending:
        part = pending.pop()
        is_call = part.op in ("call_function", "call_method") and not changes(part)
        if not is_call or operation(part) in _RANDOM or len(order) > _LONGEST:
            return None
        order[part] = None
        pending += [operand for operand in part.all_input_nodes if operand not in order]
    values: dict[Node, Any] = {}
    for part in sorted(order):
        args = map_arg(part.args, values.__getitem__)
        kwargs = map_arg(part.kwargs, values.__getitem__)
        call = getattr(type(args[0]), part.target) if part.op == "call_method" else part.target
        values[part] = call(*args, **kwargs)
    return values[node]
