"""Calls of attention without masks and copies that it does not need."""

from typing import Any

import torch
from torch.cuda import get_device_capability
from torch.fx import Node

from .editing import Editor, fits, is_part
from .kernel_set import adaln, rmsnorm, rope3d
from .matching import adds_dimensions, argument, dtype_of, is_tensor, operation, shape_of, value

_ATTENTION = "scaled_dot_product_attention"
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def drop_causal_mask(editor: Editor, node: Node) -> None:
    """Call attention without a mask, if its mask is that of causal attention over the same tokens."""
    if operation(node) != _ATTENTION:
        return
    query, key, _, mask = (argument(node, index, name) for index, name in enumerate(_NAMES[:4]))
    tokens = shape_of(query)[-2]
    if not is_tensor(mask) or argument(node, 5, "is_causal", False) or shape_of(key)[-2] != tokens:
        return
    # transformers makes one where it may not look at position ids, as in a trace: these may be of several texts.
    if mask not in editor.causal:  # a mask of many tokens is large, and all layers have the same
        made = editor.constant(mask)
        is_square = made is not None and made.dtype == torch.bool and made.shape[-2:] == (tokens, tokens)
        editor.causal[mask] = is_square and torch.equal(made, torch.ones_like(made).tril())
    if editor.causal[mask]:
        _call_with(node, attn_mask=None, is_causal=True)
        editor.erase_unused(mask)


def group_heads(editor: Editor, node: Node) -> None:
    """Call attention with keys and values as they are, if they are copied for each head of the query.

    With a mask, and in float32 or before capability 8.0 on CUDA, Torch would choose an attention that keeps all scores.
    """
    if operation(node) != _ATTENTION or argument(node, 3, "attn_mask") is not None or node.kwargs.get("enable_gqa"):
        return
    query, *copies = (argument(node, index, name) for index, name in enumerate(_NAMES[:3]))
    memory = [unrepeated(copy) for copy in copies]
    if any(part is copy for part, copy in zip(memory, copies)) or not editor.may_join(copies, node):
        return
    is_small = fits(query, torch.float16, torch.bfloat16) and value(query).size(-1) <= 256
    device = value(query).device
    if not fits(query) or (device.type == "cuda" and not (is_small and get_device_capability(device) >= (8, 0))):
        return
    _call_with(node, **dict(zip(_NAMES[1:], memory)), enable_gqa=True)
    for copy in copies:
        editor.erase_unused(copy)


def normalize_tokens_first(editor: Editor, node: Node) -> None:
    """Normalize heads before a transpose: cuDNN's results have the query's order in memory, and copies become views."""
    x = node.args[0] if node.target in (adaln.ada_layer_norm, rmsnorm.rms_norm) else None
    if operation(x) != "transpose" or x.args[1:] != (1, 2) or value(x).dim() != 4 or dtype_of(x) != dtype_of(node):
        return
    parts = [part for user in node.users for part in (user.users if is_part(user) else (user,))]
    readers = [reader for part in parts for reader in (part.users if operation(part) == "transpose" else (part,))]
    attentions = [part for part in readers if operation(part) == _ATTENTION]
    is_known = node.target is rmsnorm.rms_norm or node.args[1] is None  # the scale
    is_known &= all(part in attentions or part.target is rope3d.apply_rotary for part in readers)
    moved = [user for part in attentions for user in part.users]
    copies = [user for part in moved for user in part.users]
    is_known &= len(copies) == len(attentions)
    is_known &= all(operation(part) == "transpose" and part.args[1:] == (1, 2) for part in moved)
    is_known &= all(operation(part) in ("reshape", "flatten") and value(part).is_contiguous() for part in copies)
    if is_known and not any(map(editor.is_written, copies)):
        norm = editor.insert(node, node.target, (x.args[0], *node.args[1:]), like=node)
        norm.meta["example_value"] = value(x.args[0])
        editor.replace(node, editor.insert_view(node, "transpose", norm, 1, 2))


def unrepeated(states: Any) -> Any:
    """Return the keys or values of which transformers makes one for each head of the query."""
    inner = states.args[0].args[0] if operation(states) == "reshape" and operation(states.args[0]) == "expand" else None
    if adds_dimensions(inner) and value(inner).dim() == 5 and shape_of(inner)[2:] == (1, *shape_of(states)[2:]):
        return inner.args[0] if shape_of(inner)[0] == shape_of(states)[0] else states
    return states


def _call_with(node: Node, **changed: Any) -> None:
    node.args, node.kwargs = (), {**node.kwargs, **dict(zip(_NAMES, node.args)), **changed}
