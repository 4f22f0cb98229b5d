"""Decoding steps of transformers: attention that reads a fixed cache, and the kernels of decode in a step's graph.

The products of a step have few rows, and its attention one token: the kernels of decode read weights and cached states
once, at the speed of the memory. transformers asks for attention functions by name, and takes new ones: in a step the
model's configuration names `_attend`. The rest follows from the graph of the step (`recording`).

This module imports transformers: import it only for a model of transformers.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import handle_torch_function, has_torch_function
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .editing import Editor, fits, is_alike, is_view
from .generation_cache import FixedCache
from .kernel_set import decode, geglu, rope3d, takes
from .values import argument, dtype_of, operation, same_value, shape_of, value

_NAME = "blocks_decoding"
_ROWS = 8  # that the kernels of decode take
_ELEMENTS = 256  # of a head, at most
_ROTATED_ELEMENTS = (64, 128, 256)  # of a head that attention rotates itself
_GROUP = 3  # products that one kernel computes: those of q, k and v
_thread = threading.local()


@contextmanager
def attention_of_step(model: nn.Module, cache: FixedCache) -> Iterator[None]:
    """Let the modules of `model` call the attention of this module."""
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "config")]
    configs = {id(module.config): module.config for module in attentions}
    changed = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == "sdpa"]
    _thread.cache = cache
    try:
        for config in changed:
            config._attn_implementation = _NAME
        yield
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"
        del _thread.cache


def _mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """Make the masks of other threads, which may run the model while this one captures a step."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one token. Calls from outside of a step, and unusual ones, go to transformers' own.

    Args:
        module: The attention, for transformers' own function.
        query: [batch, heads, 1, elements].
        key, value: [batch, key heads, positions, elements], as the cache gave them.
        attention_mask: [batch, 1, 1, positions], whether a position is read.
        kwargs: Other arguments of the function: `scaling`, and some that do not matter to one token.
    """
    cache: Optional[FixedCache] = getattr(_thread, "cache", None)
    new = None if cache is None else cache.take_new(key)
    if not _is_usual(query, key, value, attention_mask, kwargs):
        if new is not None:
            new.write()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    options = {"mask": attention_mask, "scale": kwargs.get("scaling")}
    if new is not None:
        # The content of the cache was written in earlier steps, and a step begins with kernels of Torch, which wait for
        # all that was launched before.
        options |= {"new_key": new.key, "new_value": new.value, "position": new.slot, "constant_cache": True}
    return attention(query, key, value, **options), None


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return `decode.attention`, as one call in a graph."""
    if has_torch_function((query, key, value)):
        return handle_torch_function(attention, (query, key, value), query, key, value, **options)
    return decode.attention(query, key, value, **options)


def _is_usual(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], kwargs: dict[str, Any]) -> bool:
    return (
        hasattr(_thread, "cache")
        and query.shape[2] == 1
        and takes(query)
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] % 8 == 0
        and query.shape[3] <= _ELEMENTS
        and (mask is None or mask.dtype == torch.bool)
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )


# --- the graph of a step ----------------------------------------------------------------------------------------------


def fuse_step(module: GraphModule) -> None:
    """Replace the products and the attention of a step, after `fusions.fuse`."""
    editor = Editor(module)
    for replace in (_rotate_in_attention, _join_gate, _join_residual):
        for node in editor.nodes():
            replace(editor, node)
    for node in reversed(list(editor.nodes())):
        _multiply(editor, node)
    module.graph.lint()


def _product(node: Any, users: Optional[int] = None) -> Optional[tuple[Node, Node, Optional[Node]]]:
    """Return the input, the weight and the bias of a product that the kernels compute, or None."""
    if operation(node) != "linear" or node.target is decode.linear or (users is not None and len(node.users) != users):
        return None
    x, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    is_one_dtype = all(fits(part, dtype_of(x)) for part in (x, weight, bias) if part is not None)
    has_few_rows = 0 < math.prod(shape_of(x)[:-1]) <= _ROWS and shape_of(x)[-1] > 0
    return (x, weight, bias) if is_one_dtype and has_few_rows else None


def _are_constant(editor: Editor, *weights: Node) -> bool:
    # Nothing writes the parameters of a model in a step.
    return all(weight.op == "get_attr" and isinstance(editor.constant(weight), nn.Parameter) for weight in weights)


def _join_gate(editor: Editor, node: Node) -> None:
    """Compute the two products of a gated activation together with it."""
    if node.target not in (geglu.swiglu_pair, geglu.geglu_pair):
        return
    sides = [same_value(part) for part in node.args[:2]]
    gate, up = (_product(side, users=1) for side in sides)
    if gate is None or up is None or not editor.may_join(sides, node):
        return
    (x, weight, bias), (other, up_weight, up_bias) = gate, up
    if x is not other or shape_of(weight) != shape_of(up_weight):
        return
    exact = node.target is geglu.geglu_pair and node.args[2:] != ("tanh",)
    activation = "silu" if node.target is geglu.swiglu_pair else "gelu" if exact else "gelu_tanh"
    options = {"activation": activation, "constant_weights": _are_constant(editor, weight, up_weight)}
    args = (x, weight, up_weight, bias, up_bias)
    editor.replace(node, editor.insert(node, decode.gated_linear, args, options, like=node))


def _join_residual(editor: Editor, node: Node) -> None:
    """Compute a product and the sum that follows it."""
    if operation(node) != "add" or node.kwargs or len(node.args) != 2:
        return
    for part, residual in (node.args, node.args[::-1]):
        product = _product(part, users=1)
        if product is None or part is residual or not is_alike(node, part, residual):
            continue
        if editor.may_join([part], node):
            options = {"residual": residual, "constant_weights": _are_constant(editor, product[1])}
            editor.replace(node, editor.insert(node, decode.linear, product, options, like=node))
            return


def _multiply(editor: Editor, node: Node) -> None:
    """Compute a product, together with later ones of the same input."""
    product = None if editor.is_erased(node) else _product(node)
    if product is None:
        return
    group = [node]
    for user in sorted(product[0].users):
        is_like = user > node and user.args[:1] == product[:1] and _product(user) is not None
        if len(group) < _GROUP and is_like and editor.may_join([node], user):
            group.append(user)
    parts: list[Any] = [_product(member) for member in group]
    is_constant = _are_constant(editor, *(weight for _, weight, _ in parts))
    if len(group) == 1:
        options = {"constant_weights": is_constant}
        editor.replace(node, editor.insert(node, decode.linear, product, options, like=node))
        return
    weights, biases = [weight for _, weight, _ in parts], [bias for *_, bias in parts]
    if any(operand > node for operand in (*weights, *biases) if operand is not None):
        return
    call = editor.insert(node, decode.linears, (product[0], weights, biases), {"constant_weights": is_constant})
    results = [editor.insert_part(node, call, index, like=member) for index, member in enumerate(group)]
    for member, result in zip(group, results):
        editor.replace(member, result)


def _rotate_in_attention(editor: Editor, node: Node) -> None:
    """Let attention rotate and normalize q and k, if nothing else reads them."""
    if node.target is not attention or "new_key" not in node.kwargs:
        return
    (query, views), (key, key_views) = _origin(node.args[0]), _origin(node.kwargs["new_key"])
    rotation = query.args[0] if operation(query) == "getitem" else None
    if rotation is None or operation(key) != "getitem" or key.args != (rotation, 1) or query.args[1] != 0:
        return
    given = _rotated(rotation)
    if given is None or len(rotation.users) != 2 or not editor.may_join([rotation], node):
        return
    if any(len(part.users) != 1 for part in (query, key, *views, *key_views)):
        return
    q, k, options = given
    q, k = editor.repeat_views(node, reversed(views), q), editor.repeat_views(node, reversed(key_views), k)
    half = shape_of(options["cos"])[-1] // 2 if shape_of(options["cos"])[-1] == shape_of(q)[-1] else None
    for name in ("cos", "sin"):
        table = options[name]
        if value(table).dim() == 3:
            table = editor.insert_view(node, "squeeze", table, 1)
        options[name] = table if half is None else editor.insert_view(node, "narrow", table, -1, 0, half)
    new = editor.insert(node, attention, (q, *node.args[1:]), {**node.kwargs, **options, "new_key": k}, like=node)
    editor.replace(node, new)


def _origin(node: Any) -> tuple[Node, list[Node]]:
    """Return the value that a node is a view of, and the views, the last one first."""
    views = []
    while is_view(node):
        views.append(node)
        node = node.args[0]
    return node, views


def _rotated(rotation: Any) -> Optional[tuple[Node, Node, dict[str, Any]]]:
    """Return q and k before a rotation, and the options by which `decode.attention` rotates, or None."""
    options = dict(rotation.kwargs)
    if rotation.target is rope3d.apply_rotary:
        q, k, cos, sin = rotation.args
        norm: dict[str, Any] = {}
    elif rotation.target is rope3d.norm_rotary and options.pop("norm") == "head":
        q, k, query_weight, key_weight, cos, sin = rotation.args
        norm = {"query_weight": query_weight, "key_weight": key_weight}
        norm |= {name: options.pop(name) for name in ("eps", "offset", "rounding")}
    else:
        return None
    if k is None or options.pop("pairs") != "half" or not fits(q) or shape_of(q)[-1] not in _ROTATED_ELEMENTS:
        return None
    width, weights = shape_of(q)[-1], [norm[name] for name in ("query_weight", "key_weight") if norm]
    if options.pop("rotary_dim", width) != width or options:
        return None
    if not all(fits(part, dtype_of(q)) for part in (k, cos, sin, *weights)):
        return None
    if shape_of(cos)[-1] == width and not (_repeats(cos) and _repeats(sin)):
        return None
    return q, k, {"cos": cos, "sin": sin, **norm}


def _repeats(table: Node) -> bool:
    """Return whether the second half of each row is the first half, as in tables of transformers."""
    node: Any = table
    while operation(node) in ("cast", "unsqueeze", "squeeze", "cos", "sin") or (
        operation(node) == "mul" and isinstance(node.args[1], (int, float))
    ):
        node = node.args[0]
    parts: Any = node.args[0] if operation(node) == "cat" else ()
    return len(parts) == 2 and parts[0] is parts[1] and argument(node, 1, "dim", 0) == -1
