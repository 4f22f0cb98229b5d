"""Attention masks that a graph makes of constants: causal ones are left to the attention, which is faster without.

Where transformers may not look at position ids, as in a trace, it makes a mask in case these are of several texts.
"""

from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .editing import Editor
from .values import argument, changes, is_tensor, operation, shape_of

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
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    node.kwargs = {**node.kwargs, **dict(zip(names, node.args)), "attn_mask": None, "is_causal": True}
    node.args = ()
    editor.erase_unused(mask)


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
