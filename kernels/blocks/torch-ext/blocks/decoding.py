"""The kernels of decode in the graph of a decoding step: its products have few rows, and its attention one token."""

import math
from typing import Any, Optional

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .attention import unrepeated
from .editing import Editor, fits, is_alike, origin
from .kernel_set import decode, geglu, rope3d
from .matching import argument, dtype_of, operation, shape_of, value

_ROWS = 8  # that the kernels of decode take
_ELEMENTS = 256  # of a head, at most
_ROTATED_ELEMENTS = (64, 128, 256)  # of a head that attention rotates itself
_GROUP = 3  # products that one kernel computes: those of q, k and v


def fuse_step(module: GraphModule) -> None:
    """Replace the products and the attention of a step, after `fusions.fuse`."""
    editor = Editor(module)
    for replace in (_attend, _join_gate, _join_residual):
        for node in editor.nodes():
            replace(editor, node)
    for node in editor.nodes(iter):
        _multiply(editor, node)
    module.graph.lint()


def _product(node: Any, users: Optional[int] = None) -> Optional[tuple[Node, Node, Optional[Node]]]:
    """Return the input, the weight and the bias of a product that the kernels compute, or None."""
    if operation(node) != "linear" or node.target is decode.linear or (users is not None and len(node.users) != users):
        return None
    x, weight, bias = (argument(node, index, name) for index, name in enumerate(("input", "weight", "bias")))
    is_one_dtype = all(fits(part, dtype_of(x)) for part in (node, x, weight, bias) if part is not None)
    has_few_rows = 0 < math.prod(shape_of(x)[:-1]) <= _ROWS and shape_of(x)[-1] > 0
    return (x, weight, bias) if is_one_dtype and has_few_rows else None


def _are_constant(editor: Editor, *weights: Node) -> bool:
    given = [getattr(editor.module, weight.target) if weight.op == "get_attr" else None for weight in weights]
    return all(isinstance(weight, nn.Parameter) for weight in given) and not any(map(editor.is_written, weights))


def _join_gate(editor: Editor, node: Node) -> None:
    """Compute the two products of a gated activation together with it."""
    if node.target not in (geglu.swiglu_pair, geglu.geglu_pair):
        return
    sides = node.args[:2]
    gate, up = (_product(side, users=1) for side in sides)
    if gate is None or up is None or not editor.may_join(sides, node):
        return
    (x, weight, bias), (other, up_weight, up_bias) = gate, up
    if x is not other or shape_of(weight) != shape_of(up_weight):
        return
    exact = node.target is geglu.geglu_pair and node.kwargs.get("approximate") != "tanh"
    activation = "silu" if node.target is geglu.swiglu_pair else "gelu" if exact else "gelu_tanh"
    options = {"activation": activation, "constant_weights": _are_constant(editor, weight, up_weight)}
    args = (x, weight, up_weight, bias, up_bias)
    editor.replace_by_call(node, decode.gated_linear, args, options)


def _join_residual(editor: Editor, node: Node) -> None:
    """Compute a product and the sum that follows it."""
    if operation(node) != "add" or node.kwargs or len(node.args) != 2:
        return
    for part, residual in (node.args, node.args[::-1]):
        product = _product(part, users=1)
        is_sum = part is not residual and is_alike(node, part, residual)
        if product is not None and is_sum and editor.may_join([part], node):
            options = {"residual": residual, "constant_weights": _are_constant(editor, product[1])}
            editor.replace_by_call(node, decode.linear, product, options)
            return


def _multiply(editor: Editor, node: Node) -> None:
    """Compute a product, together with later ones of the same input."""
    product = _product(node)
    if product is None:
        return
    group = [node]
    for user in sorted(product[0].users):
        is_like = user > node and user.args[:1] == product[:1] and _product(user) is not None
        if len(group) < _GROUP and is_like and editor.may_join([node], user):
            group.append(user)
    parts: list[Any] = [_product(member) for member in group]
    weights, biases = [weight for _, weight, _ in parts], [bias for *_, bias in parts]
    options = {"constant_weights": _are_constant(editor, *weights)}
    if len(group) == 1:
        editor.replace_by_call(node, decode.linear, product, options)
        return
    if any(operand > node for operand in (*weights, *biases) if operand is not None):
        return
    call = editor.insert(node, decode.linears, (product[0], weights, biases), options)
    results = [editor.insert_part(node, call, index, like=member) for index, member in enumerate(group)]
    for member, result in zip(group, results):
        editor.replace(member, result)


def _attend(editor: Editor, node: Node) -> None:
    """Compute the attention of one token over a fixed cache, and write its key and value there."""
    if operation(node) != "scaled_dot_product_attention" or len(node.args) < 3 or not fits(node):
        return
    query, memory = node.args[0], [unrepeated(part) for part in node.args[1:3]]
    mask = argument(node, 3, "attn_mask")
    writes = [_write_to(part, node) for part in memory]
    if None in writes or argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False):
        return
    (keys, values), shape = memory, shape_of(query)
    batch, elements, heads = shape[0], shape[-1], math.prod(shape[1:-1])
    if len(shape) != 4 or shape_of(keys) != shape_of(values) or elements % 8 or elements > _ELEMENTS:
        return
    # transformers packs the heads that share a key into rows.
    is_packed = shape[1] == shape_of(keys)[1]
    if not (is_packed or shape[2] == 1) or dtype_of(query) != dtype_of(keys) or heads % shape_of(keys)[1]:
        return
    if mask is not None and (dtype_of(mask) != torch.bool or shape_of(mask)[1:3] != (1, 1)):
        return
    (*_, slot, new_key), (*_, other_slot, new_value) = (write.args for write in writes)
    if slot is not other_slot or not editor.may_join(writes, node, writes):
        return
    options = {"new_key": new_key, "new_value": new_value, "position": slot}
    query, rotation = _unrotated(editor, node, query, writes) or (query, {})
    if shape_of(query)[2] != 1:
        query = editor.insert_view(node, "reshape", query, batch, heads, 1, elements)
    # Earlier steps wrote the content of the cache, and kernels of Torch, which wait for these, begin a step.
    options |= {**rotation, "mask": mask, "scale": argument(node, 6, "scale"), "constant_cache": True}
    new = editor.insert(node, decode.attention, (query, keys, values), options)
    new.meta["example_value"] = value(query).transpose(1, 2)
    editor.replace(node, editor.insert_view(node, "reshape", new, *shape))
    for write in writes:
        editor.erase(write)


def _write_to(memory: Any, attention: Node) -> Optional[Node]:
    """Return the call that writes the new token, if nothing but an attention reads the memory after it."""
    if not isinstance(memory, Node) or memory.op != "get_attr" or not fits(memory):
        return None
    writes = [user for user in memory.users if operation(user) == "index_copy_" and user.args[:2] == (memory, 2)]
    readers: set[Node] = set()
    pending = [user for user in memory.users if user not in writes]
    while pending:
        user = pending.pop()
        is_repeat = operation(user) in ("getitem", "expand", "reshape")
        readers.update(() if is_repeat else (user,))
        pending += user.users if is_repeat else ()
    return writes[0] if len(writes) == 1 and writes[0] < attention and readers == {attention} else None


def _unrotated(editor: Editor, node: Node, query: Any, writes: list[Any]) -> Optional[tuple[Node, dict[str, Any]]]:
    """Return the query before its rotation and norm, and the options for these; None if others read their results."""
    (query, views), (key, key_views) = origin(query), origin(writes[0].args[3])
    rotation = query.args[0] if operation(query) == "getitem" else None
    if rotation is None or operation(key) != "getitem" or key.args != (rotation, 1) or query.args[1] != 0:
        return None
    given = _rotated(rotation)
    if given is None or len(rotation.users) != 2 or not editor.may_join([rotation], node, writes):
        return None
    if any(len(part.users) != 1 for part in (query, key, *views, *key_views)):
        return None
    q, k, options = given
    q, k = editor.repeat_views(node, reversed(views), q), editor.repeat_views(node, reversed(key_views), k)
    half = shape_of(options["cos"])[-1] // 2 if shape_of(options["cos"])[-1] == shape_of(q)[-1] else None
    for name in ("cos", "sin"):
        table = options[name]
        if value(table).dim() == 3:
            table = editor.insert_view(node, "squeeze", table, 1)
        options[name] = table if half is None else editor.insert_view(node, "narrow", table, -1, 0, half)
    return q, {**options, "new_key": k}


def _rotated(rotation: Any) -> Optional[tuple[Node, Node, dict[str, Any]]]:
    """Return q and k before a rotation, and the options by which `decode.attention` rotates, or None."""
    options = dict(rotation.kwargs)
    if rotation.target not in (rope3d.apply_rotary, rope3d.norm_rotary) or options.pop("norm", "head") != "head":
        return None
    q, k, *weights, cos, sin = rotation.args  # weights of norms, if it has these
    norm = {name: options.pop(name) for name in ("eps", "offset", "rounding") if name in options}
    norm |= zip(("query_weight", "key_weight"), weights)
    if k is None or options.pop("pairs") != "half" or not fits(q) or shape_of(q)[-1] not in _ROTATED_ELEMENTS:
        return None
    width = shape_of(q)[-1]
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
    kept = ("cast", "unsqueeze", "squeeze", "cos", "sin")
    while operation(node) in kept or (operation(node) == "mul" and isinstance(node.args[1], (int, float))):
        node = node.args[0]
    parts: Any = node.args[0] if operation(node) == "cat" else ()
    return len(parts) == 2 and parts[0] is parts[1] and argument(node, 1, "dim", 0) == -1
