"""Norms, modulations, gates, residual sums and gated activations by the kernels, in a graph of Dynamo's."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .attention import drop_causal_mask, group_heads, normalize_tokens_first
from .editing import RANDOM, Editor, broadcasts, fits, is_alike
from .kernel_set import DEVICE, adaln, geglu, loss, rmsnorm, rope3d
from .matching import Match, Pattern, argument, dtype_of, matches, operation, shape_of, value, walk
from .patterns import ACTIVATED, GATED, MODULATED, NORM
from .rotations import rotate, rotate_together
from .training import GATES, gated_linear, join_loss, recompute_gate

HAS_EPILOGUE = DEVICE == "cuda"  # for a GELU: on the CPU it is the exact one
_RESULTS = {"add", "mul", "div", "cast", "layer_norm", "rms_norm"}  # the last operations of the patterns
_OBSTACLES = re.compile("(t|transpose|swapaxes|swapdims|squeeze|unsqueeze|as_strided|set)_|_enter_inference_mode")
_NORMS = (rmsnorm.rms_norm, adaln.ada_layer_norm, adaln.ada_rms_norm)

# The operation of a kernel's function, for the report, and the package that it is from.
KERNELS_OF = {
    rmsnorm.rms_norm: ("RMSNorm", "rmsnorm"),
    rmsnorm.add_rms_norm: ("residual sum with RMSNorm", "rmsnorm"),
    adaln.ada_layer_norm: ("LayerNorm, with modulation or without", "adaln"),
    adaln.ada_rms_norm: ("norm with modulation", "adaln"),
    adaln.gate_residual: ("residual sum with gate", "adaln"),
    adaln.gate_residual_ada_norm: ("residual sum with norm, gate and modulation", "adaln"),
    **dict.fromkeys((*GATES, gated_linear), ("gated activation", "geglu")),
    loss.linear_cross_entropy: ("cross entropy with its linear layer", "loss"),
    rope3d.apply_rotary: ("rotary embedding", "rope3d"),
    rope3d.norm_rotary: ("q/k norm with rotary embedding", "rope3d"),
}


def fuse(module: GraphModule, returns_logits: bool = True) -> list[tuple[Node, str]]:
    """Replace all operations of a graph that the kernels compute. Return those that almost are, and the reasons.

    Without `returns_logits`, a graph with gradients returns None for logits that only a loss reads.
    """
    editor = Editor(module)
    if obstacles := [node for node in module.graph.nodes if _OBSTACLES.fullmatch(operation(node))]:
        return [(obstacles[0], "its graph changes a tensor's shape or memory in place, or the inference mode")]
    editor.remove_copies()
    editor.merge_equal()
    editor.straighten_sums()
    matched = ((MODULATED, _modulated), ({"": NORM}, _normalized_by), (GATED, _gated))
    passes: list[Any] = [partial(join_loss, returns_logits=returns_logits), drop_causal_mask, group_heads, rotate]
    passes += [partial(_replace_match, patterns=patterns, kernel_of=kernel_of) for patterns, kernel_of in matched]
    passes += [_add_before_norm, rotate_together, normalize_tokens_first]
    passes += [partial(_replace_match, patterns=ACTIVATED, kernel_of=_activated), recompute_gate, _join_gelu]
    for replace in passes:
        for node in editor.nodes():
            replace(editor, node)
    module.graph.lint()
    module.recompile()
    return editor.misses


def _replace_match(editor: Editor, node: Node, patterns: Mapping[str, Pattern], kernel_of: Callable[..., Any]) -> None:
    """Replace a match of one of some patterns, by their names, by the call that `kernel_of` returns, or None."""
    is_result = operation(node) in _RESULTS and fits(node) and not editor.is_written(node, value(node))
    given = patterns.items() if is_result else ()
    for name, found in ((name, found) for name, pattern in given for found in matches(pattern, node)):
        call = kernel_of(editor, node, found, name)
        if call is not None and editor.may_join(found.nodes, node):
            editor.replace_by_call(node, *call)
            return


def _modulated(editor: Editor, node: Node, found: Match, rounding: str) -> Any:
    x, weight, scale, shift = (found[name] for name in ("x", "weight", "scale", "shift"))
    is_layer, is_narrow = "layer" in found.tags, dtype_of(x) != torch.float32
    if not _is_norm(found, node) or "offset" in found.tags or ("before_weight" in found.tags and is_narrow):
        return None
    if rounding == "each" and weight is not None and dtype_of(weight) != dtype_of(x):
        return None
    dtype = torch.float32 if rounding == "last" else dtype_of(x)
    if not (fits(scale, dtype) and fits(shift, dtype)):
        return None
    scale = editor.repeat_views(node, reversed(found["views"]), scale)
    if shape_of(scale) != shape_of(shift) or not broadcasts(scale, x):
        return None
    parts = (weight, found["bias"]) if is_layer else (weight,)
    function = adaln.ada_layer_norm if is_layer else adaln.ada_rms_norm
    return function, (x, scale, shift, *parts, found["eps"], rounding)


def _normalized_by(editor: Editor, node: Node, found: Match, _: str) -> Any:
    if not _is_norm(found, node):
        return None
    x, weight, eps = found["x"], found["weight"], found["eps"]
    if "layer" in found.tags:
        return adaln.ada_layer_norm, (x, None, None, weight, found["bias"], eps, "last")
    rounding = "before_weight" if "before_weight" in found.tags else "last"
    return rmsnorm.rms_norm, (x, weight, eps, 1.0 if "offset" in found.tags else 0.0, rounding)


def _is_norm(found: Match, node: Node) -> bool:
    """Return whether a kernel computes a matched norm."""
    x, weight = found["x"], found["weight"]
    if not fits(x) or value(x).stride(-1) != 1 or found["eps"] is None:
        return False
    given = [part for part in (weight, found["bias"]) if part is not None]
    if not all(fits(part, dtype_of(x), torch.float32) and shape_of(part) == shape_of(x)[-1:] for part in given):
        return False
    keeps = weight is None or "before_weight" not in found.tags
    dtype = dtype_of(x) if keeps else torch.promote_types(dtype_of(x), dtype_of(weight))
    return dtype_of(node) == dtype and len({*map(dtype_of, given)}) < 2


def _gated(editor: Editor, node: Node, found: Match, rounding: str) -> Any:
    if value(node).dim() < 2 or (rounding == "last" and dtype_of(node) == torch.float32):
        return None
    x, branch, gate = found["x"], found["branch"], found["gate"]
    if shape_of(branch) != shape_of(x):
        branch, gate = gate, branch
    dtype = torch.float32 if rounding == "last" else dtype_of(x)
    does = is_alike(node, x, branch) and fits(gate, dtype) and broadcasts(gate, x)
    return (adaln.gate_residual, (x, branch, gate, rounding)) if does else None


def _add_before_norm(editor: Editor, node: Node) -> None:
    """Compute a norm together with the residual sum before it."""
    if node.target not in _NORMS or dtype_of(node) != dtype_of(node.args[0]):
        return
    total: Any = node.args[0]
    is_gated = total.target is adaln.gate_residual
    if not is_gated and (operation(total) != "add" or total.kwargs):
        return
    x, branch, *gating = total.args
    kernel = _sum_and_norm(node, x, branch, *gating) if is_alike(total, x, branch) else None
    if kernel is None or not editor.may_join([total], node) or editor.is_written(total, value(total)):
        return
    function, args, is_sum_last = kernel
    place = node
    if any(user < node for user in total.users if user is not node):
        late = _made_after(total, args)
        if late is None:
            return
        for part in sorted(late):
            total.prepend(part)
        place = total
    both = editor.insert(place, function, args)
    both.meta = {**node.meta, "example_value": None}
    summed = editor.insert_part(place, both, int(is_sum_last), total)
    normed = editor.insert_part(place, both, int(not is_sum_last), node)
    node.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)
    both.args = args  # which `replace_all_uses_with` may have changed
    editor.erase_unused(node)
    editor.erase_unused(total)


def _sum_and_norm(node: Node, x: Node, branch: Node, gate: Any = None, sum_rounding: Any = None) -> Any:
    """Return the kernel that computes a sum and its norm, its arguments, and whether the sum is its last result."""
    scale = shift = bias = None
    if node.target is rmsnorm.rms_norm:
        weight, eps, offset, rounding = node.args[1:]
        if gate is None:
            return rmsnorm.add_rms_norm, (branch, x, weight, eps, offset, rounding), True
        if offset or (weight is not None and rounding == "before_weight" and dtype_of(x) != torch.float32):
            return None
    else:
        scale, shift, weight, *biases, eps, rounding = node.args[1:]
        bias = biases[0] if biases else None
    if gate is not None and scale is not None:
        is_same = rounding == sum_rounding or dtype_of(x) == torch.float32
        if not is_same or shape_of(gate) != shape_of(scale):
            return None
    rounding = rounding if scale is not None else sum_rounding or "each"
    kind = "layer" if node.target is adaln.ada_layer_norm else "rms"
    return adaln.gate_residual_ada_norm, (x, branch, gate, scale, shift, weight, bias, eps, kind, rounding), False


def _made_after(place: Node, args: Iterable[Any]) -> Optional[set[Node]]:
    """Return the nodes that make operands after `place`; None if they depend on its result, are random, or many."""
    operands = (arg for arg in args if isinstance(arg, Node))
    made = {*walk(operands, lambda node: node.all_input_nodes if node > place else ())}
    late = {node for node in made if node > place}
    is_bound = place in made or len(late) > 16 or any(RANDOM.search(operation(node)) for node in late)
    return None if is_bound else late


def _activated(editor: Editor, node: Node, found: Match, name: str) -> Any:
    gate, up = found["gate"], found["up"]
    activation = next(part for part in found.nodes if operation(part) == name)
    if not is_alike(node, gate, up) or argument(activation, 1, "inplace", False) is True:
        return None
    options = {} if name == "silu" else {"approximate": argument(activation, 1, "approximate", "none")}
    return geglu.swiglu_pair if name == "silu" else geglu.geglu_pair, (gate, up), options


def _join_gelu(editor: Editor, node: Node) -> None:
    """Compute a GELU in the epilogue of its projection, which has no gradient."""
    if not HAS_EPILOGUE or operation(node) != "gelu" or argument(node, 1, "approximate", "none") != "tanh":
        return
    projection = node.args[0]
    if operation(projection) != "linear" or len(projection.args) != 3 or len(projection.users) > 1:
        return
    dtype, parts = dtype_of(projection), (projection, *projection.args)
    if not all(fits(part, torch.float16, torch.bfloat16) and dtype_of(part) == dtype for part in parts):
        return
    needs_gradient = torch.is_grad_enabled() and any(value(part).requires_grad for part in projection.args)
    if not needs_gradient and value(projection).dim() > 1 and editor.may_join([projection], node):
        editor.replace_by_call(node, linear_gelu, projection.args)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `gelu(linear(x, weight, bias), approximate="tanh")`, with the GELU in the epilogue of the product."""
    # Torch has no documented function for it. The schemas of ATen's ops stay compatible.
    out = torch.ops.aten._addmm_activation.default(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], out.shape[-1])
