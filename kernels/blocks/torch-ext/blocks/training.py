"""Training steps that keep fewer tensors: the head and its loss in one kernel, gated products computed again."""

from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .editing import Editor, fits
from .kernel_set import geglu, loss
from .matching import argument, call, dtype_of, matches, named, operation, shape_of, value

GATES = (geglu.geglu_pair, geglu.swiglu_pair)
_cap = named("cap", number=True)
_CAPPED = call("tanh", named("x") / _cap) * _cap
_ROWS = {"view", "reshape", "flatten", "contiguous"}
_RETURNED = "the call returns logits, computed apart from the loss: accelerate(model, logits=False) leaves them out"


def join_loss(editor: Editor, node: Node, returns_logits: bool) -> None:
    """Compute a cross entropy with its linear layer, and again the logits that the graph returns: that saves memory."""
    if operation(node) != "cross_entropy" or dtype_of(node) != torch.float32:
        return
    logits, target = argument(node, 0, "input"), argument(node, 1, "target")
    if len(shape_of(logits)) != 2 or value(target).dtype != torch.int64:
        return
    reduction = argument(node, 6, "reduction", "mean")
    others = [argument(node, index, name) for index, name in ((2, "weight"), (3, "size_average"), (5, "reduce"))]
    found = _head_of(logits)
    if found is None or reduction not in ("mean", "sum") or any(other is not None for other in others):
        return
    chain, cap = found
    x, weight, bias = (argument(chain[-1], index, name) for index, name in enumerate(("input", "weight", "bias")))
    if value(x).dim() < 2 or not all(part is None or fits(part) for part in (x, weight, bias)):
        return
    users = {user for part in chain for user in part.users} - {node, *chain}
    may_join = editor.may_join(chain, node) and (not users or torch.is_grad_enabled())
    if not may_join or any(user.op != "output" for user in users):
        return
    if users and returns_logits:
        editor.misses.append((node, _RETURNED))
    dtype = dtype_of(chain[-1])  # autocast may give the layer another dtype than its operands have
    x, weight, bias = (
        editor.insert_view(node, "to", part, dtype) if part is not None and dtype_of(part) != dtype else part
        for part in (x, weight, bias)
    )
    rows = editor.insert_view(node, "flatten", x, 0, -2)
    options = {
        "linear_bias": bias,
        "reduction": reduction,
        "ignore_index": argument(node, 4, "ignore_index", -100),
        "label_smoothing": argument(node, 7, "label_smoothing", 0.0),
        "softcap": cap,
    }
    for user in users if not returns_logits else ():
        user.args = map_arg(user.args, lambda part: None if part in chain else part)
    editor.replace_by_call(node, loss.linear_cross_entropy, (rows, weight, target), options)


def _head_of(logits: Any) -> Optional[tuple[list[Node], float]]:
    """Return the operations from logits back to the linear layer that computes them, and their softcap."""
    chain: list[Node] = []
    cap = 0.0
    while True:
        chain.append(logits)
        name = operation(logits)
        if name == "linear":
            return chain, cap
        is_wider = name == "cast" and dtype_of(logits) == torch.float32
        if is_wider or (name in _ROWS and shape_of(logits)[-1] == shape_of(logits.args[0])[-1]):
            logits = logits.args[0]
        elif not cap and (capped := next(matches(_CAPPED, logits), None)) is not None:
            chain += capped.nodes
            logits, cap = capped["x"], abs(float(capped["cap"]))
        else:
            return None


def recompute_gate(editor: Editor, node: Node) -> None:
    """Let a linear layer whose weight has a gradient keep the operands of its gated input, if nothing else reads it."""
    if operation(node) != "linear" or not torch.is_grad_enabled():
        return
    gated, weight, bias = (argument(node, index, name) for index, name in enumerate(("input", "weight", "bias")))
    # Autocast may give the layer another dtype than its operands have.
    is_gated = isinstance(gated, Node) and gated.target in GATES and len(gated.users) == 1
    is_gated = is_gated and dtype_of(node) == dtype_of(gated) and value(node).dim() > 1
    if not is_gated or not fits(weight, dtype_of(gated)) or not (bias is None or fits(bias, dtype_of(gated))):
        return
    if value(weight).requires_grad and editor.may_join([gated], node):
        args = (gated.target.__name__, dict(gated.kwargs), gated.args, weight, bias)
        editor.replace_by_call(node, gated_linear, args).meta["nn_module_stack"] = gated.meta.get("nn_module_stack")


def gated_linear(gate: str, options: Any, inputs: Any, weight: Tensor, bias: Any) -> Tensor:
    """Return `linear(gate(*inputs, **options), weight, bias)`, keeping the inputs; `gate` is the name of a function."""
    gated = partial(getattr(geglu, gate), **options)
    return _GatedLinear.apply(gated, gated(*inputs), weight, bias, *inputs)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gated: Any, x: Tensor, weight: Tensor, bias: Any, *inputs: Tensor) -> Tensor:
        ctx.gated = gated
        ctx.save_for_backward(weight, *inputs)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *inputs = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        of_x = grad @ weight if needs_x else None
        of_weight = rows.t() @ ctx.gated(*inputs).flatten(0, -2) if needs_weight else None
        return None, of_x, of_weight, rows.sum(0) if needs_bias else None, *(None for _ in inputs)
