"""The loss of a language model by one kernel, which computes the logits of its last layer in chunks."""

from typing import Any, Optional

import torch
from torch.fx import Node

from .editing import Editor, fits
from .kernel_set import loss
from .matching import call, match, named
from .values import argument, dtype_of, operation, shape_of, value

_cap = named("cap", number=True)
_CAPPED = call("tanh", named("x") / _cap) * _cap
_ROWS = {"view", "reshape", "flatten", "contiguous"}
_RETURNED = "the call returns its logits beside the loss: accelerate(model, logits=False) leaves them out"


def join_loss(editor: Editor, node: Node, returns_logits: bool) -> None:
    """Compute a cross entropy together with the linear layer before it, unless its logits are used elsewhere.

    `returns_logits`: whether logits that the graph returns must stay. If not, a graph with gradients returns None in
    their place.
    """
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
    if not (fits(x) and all(part is None or fits(part, dtype_of(x)) for part in (weight, bias))):
        return
    users = {user for part in chain for user in part.users} - {node, *chain}
    if any(user.op != "output" for user in users) or not editor.may_join(chain, node):
        return
    if users and (returns_logits or not torch.is_grad_enabled()):
        if torch.is_grad_enabled():
            editor.misses.append((node, _RETURNED))
        return
    rows = editor.insert_view(node, "reshape", x, -1, shape_of(x)[-1])
    options = {
        "linear_bias": bias,
        "reduction": reduction,
        "ignore_index": argument(node, 4, "ignore_index", -100),
        "label_smoothing": argument(node, 7, "label_smoothing", 0.0),
        "softcap": cap,
    }
    for user in users:
        user.args = torch.fx.node.map_arg(user.args, lambda part: None if part in chain else part)
    editor.replace_by_call(node, loss.linear_cross_entropy, (rows, weight, target), options)


def _head_of(logits: Any) -> Optional[tuple[list[Node], float]]:
    """Return the operations from logits back to the linear layer that computes them, and their softcap."""
    chain: list[Node] = []
    cap = 0.0
    while isinstance(logits, Node):
        chain.append(logits)
        name = operation(logits)
        if name == "linear":
            return chain, cap
        is_wider = name == "cast" and dtype_of(logits) == torch.float32
        if is_wider or (name in _ROWS and shape_of(logits)[-1] == shape_of(logits.args[0])[-1]):
            logits = logits.args[0]
        elif name == "mul" and not cap:
            capped = match(_CAPPED, logits)
            if capped is None:
                return None
            chain += capped.nodes
            logits, cap = capped["x"], float(capped["cap"])
        else:
            return None
    return None
