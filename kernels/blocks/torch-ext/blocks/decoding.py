"""The kernels of decode in the graph of a decoding step: its products have few rows, and its attention one token."""

import math
from typing import Any, Optional

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .attention import unrepeated
from .editing import Editor, fits, is_alike, is_part, origin
from .kernel_set import DEVICE, decode, geglu, rmsnorm, rope3d
from .matching import argument, dtype_of, is_tensor, operation, shape_of, value, walk

_ROWS = 8  # that the kernels of decode take
_ELEMENTS = 256  # of a head, at most
_ROTATED_ELEMENTS = (64, 128, 256)  # of a head that attention rotates itself
_REPEATS = ("getitem", "expand", "reshape")  # operations that repeat keys and values for the heads of a query
_NORMED_ELEMENTS = 4608  # of the input of products: norms of more in each block take longer than one of their own


def fuse_step(module: GraphModule) -> None:
    """Replace the products and the attention of a step, after `fusions.fuse`."""
    editor = Editor(module)
    for replace in (_attend, _join_residual, _join_gate, _multiply):
        for node in editor.nodes(iter if replace is _multiply else reversed):
            replace(editor, node)
    module.graph.lint()


def _product(node: Any, users: Optional[int] = None) -> Optional[tuple[Node, Node, Optional[Node]]]:
    """Return the input, the weight and the bias of a product that the kernels compute, or None."""
    if operation(node) != "linear" or node.target is decode.linear or (users is not None and len(node.users) != users):
        return None
    x, weight, bias = (argument(node, index, name) for index, name in enumerate(("input", "weight", "bias")))
    is_one_dtype = all(fits(part, dtype_of(x)) for part in (node, x, weight, bias) if part is not None)
    has_few_rows = 0 < math.prod(shape_of(x)[:-1]) <= _ROWS and shape_of(x)[-1] > 0
    return (x, weight, bias) if is_one_dtype and has_few_rows else None


def _input_of(editor: Editor, products: Any, place: Node, x: Any, *weights: Node) -> tuple[Node, dict[str, Any]]:
    """Return the input of products that one kernel computes at `place`, and options, with a norm of their own."""
    given = [getattr(editor.module, weight.target) if weight.op == "get_attr" else None for weight in weights]
    is_written = any(map(editor.is_written, weights))
    options: dict[str, Any] = {"constant_weights": {*map(type, given)} == {nn.Parameter} and not is_written}
    is_whole = is_part(x) and is_tensor(x.args[0]) and shape_of(x) == shape_of(x.args[0])  # the last token of one
    norm: Any = x.args[0] if is_whole else x
    if norm.target is not rmsnorm.rms_norm or {*x.users} != {*products} or not {*norm.users} <= {x, *products}:
        return x, options
    source, weight, eps, offset, _ = norm.args
    is_served = DEVICE == "cpu" or decode.linear_layers.can_normalize(value(source))
    is_one_dtype = all(fits(part, dtype_of(source)) for part in (source, weight, norm))
    if is_served and is_one_dtype and value(source).numel() <= _NORMED_ELEMENTS and editor.may_join([norm], place):
        return source, {**options, "norm": (weight, eps, offset)}
    return x, options


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
    x, options = _input_of(editor, sides, node, x, weight, up_weight)
    args = (x, weight, up_weight, bias, up_bias)
    editor.replace_by_call(node, decode.gated_linear, args, {"activation": activation, **options})


def _join_residual(editor: Editor, node: Node) -> None:
    """Compute a product and the sum that follows it, and the norm of the sum apart from both."""
    norm = node.args[2:] if node.target is rmsnorm.add_rms_norm else ()
    if not norm and (operation(node) != "add" or node.kwargs or len(node.args) != 2):
        return
    for part, residual in (node.args[:2], node.args[1::-1]):
        product = _product(part, users=1)
        if product is not None and part is not residual and is_alike(part, residual) and editor.may_join([part], node):
            x, options = _input_of(editor, [part], node, *product[:2])
            total = editor.insert(node, decode.linear, (x, *product[1:]), {"residual": residual, **options}, like=part)
            for result in [*node.users] if norm else [node]:
                is_norm = bool(norm) and result.args[1] == 0
                new = editor.insert(node, rmsnorm.rms_norm, (total, *norm), like=result) if is_norm else total
                editor.replace(result, new)
            return


def _multiply(editor: Editor, node: Node) -> None:
    """Compute a product, together with later ones of the same input."""
    if (product := _product(node)) is None:
        return
    x = product[0]
    later = [user for user in sorted(x.users) if user > node and user.args[:1] == (x,) and _product(user)]
    group = [node, *[user for user in later if editor.may_join([node], user)][:2]]  # of q, k and v
    _, weights, biases = zip(*map(_product, group))
    if any(operand > node for operand in (*weights, *biases) if operand is not None):
        return
    x, options = _input_of(editor, group, node, x, *weights)
    call = editor.insert(node, decode.linears, (x, weights, biases), options)
    for index, member in reversed([*enumerate(group)]):
        editor.replace(member, editor.insert_part(node, call, index, like=member))


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
    read = walk({*memory.users} - {*writes}, lambda user: user.users if operation(user) in _REPEATS else ())
    readers = {user for user in read if operation(user) not in _REPEATS}
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
    for name in ("cos", "sin"):
        if value(options[name]).dim() == 3:
            options[name] = editor.insert_view(node, "squeeze", options[name], 1)
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
    has_halves = shape_of(cos)[-1] != width or (_repeats(cos) and _repeats(sin))
    if not has_halves or not all(fits(part, dtype_of(q)) for part in (k, cos, sin, *weights)):
        return None
    return q, k, {"cos": cos, "sin": sin, **norm}


def _repeats(table: Node) -> bool:
    """Return whether the second half of each row is the first half, as in tables of transformers."""
    node: Any = table
    same = ("cast", "unsqueeze", "squeeze", "cos", "sin", "mul")
    while operation(node) in same and not any(map(is_tensor, node.args[1:])):
        node = node.args[0]
    parts: Any = node.args[0] if operation(node) == "cat" else ()
    return len(parts) == 2 and parts[0] is parts[1] and argument(node, 1, "dim", 0) == -1
