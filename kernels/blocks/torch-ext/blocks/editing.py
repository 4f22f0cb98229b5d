"""Changes to an FX graph of Dynamo's that keep the order of its effects."""

import contextlib
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from .kernel_set import DEVICE, DTYPES
from .matching import CHANGES, argument, changes, dtype_of, is_tensor, operation, shape_of, value, walk

_SPLITS = {"chunk", "split", "unbind"}
_LAID_OUT = {"view", "view_as", "as_strided"}  # their results and errors depend on the layout
_PACKED = {"contiguous", "reshape", "flatten"}
_PLAIN = (torch._subclasses.FakeTensor, torch.nn.Parameter)
RANDOM = re.compile(  # the names of random operations
    "rand|rrelu|drop|normal$|bernoulli|nomial|poisson|gumbel|multi_head|scaled_dot_product_attention"
)
_VIEWS = {"view", "reshape", "unflatten", "transpose", "permute", "unsqueeze", "squeeze", "flatten"}


class Editor:
    """One graph, whose operations are replaced by calls of the kernels."""

    def __init__(self, module: GraphModule) -> None:
        self.module, self._graph = module, module.graph
        self.misses: list[tuple[Node, str]] = []  # operations that a kernel almost computes, and the reasons
        self.unrotated: dict[Node, str] = {}  # rotations that no kernel computes, and the reasons
        self.copies: dict[Any, Node] = {}  # of tables, by the table and its part
        self.causal: dict[Node, bool] = {}  # whether a mask is that of causal attention
        self._erased: set[Node] = set()
        self._changing = [node for node in module.graph.nodes if changes(node)]
        self._modes = [node for node in self._changing if operation(node) == "_set_grad_enabled"]

    def nodes(self, order: Callable[[list[Node]], Iterable[Node]] = reversed) -> Iterable[Node]:
        """Return the nodes that are left, by default the last ones first."""
        return (node for node in order(list(self._graph.nodes)) if node not in self._erased)

    def may_join(self, nodes: Iterable[Node], place: Node, replaced: Sequence[Node] = ()) -> bool:
        """Return whether `nodes` may all be computed at `place`: none but `replaced` writes to a tensor in between."""
        ends = [*nodes, place]
        first, last = min(ends), max(ends)
        return not any(first < node < last and node not in replaced for node in self._changing)

    def fills(self, x: Node) -> list[Node]:
        """Return the assignments to new tensors, whose memory is not that of `x`."""
        return [node for node in self._changing if _fills(node) and not shares_memory(node.args[0], x)]

    def insert(self, before: Node, function: Any, args: Any, kwargs: Any = None, like: Any = None) -> Node:
        """Insert a call whose result is like that of the node `like`."""
        with self._graph.inserting_before(before):
            new = self._graph.call_function(function, tuple(args), kwargs or {})
        new.meta = {**before.meta, "example_value": None} if like is None else dict(like.meta)
        self._changing += [new] if changes(new) else []
        return new

    def insert_view(self, before: Node, target: Any, x: Node, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function, or of a method by its name, that returns a view of `x`."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self._graph.inserting_before(before):
            new = self._graph.create_node(kind, target, (x, *args), kwargs)
        new.meta = {"example_value": _result_of(new)}
        return new

    def insert_part(self, before: Node, results: Node, index: int, like: Node) -> Node:
        return self.insert(before, operator.getitem, (results, index), like=like)

    def repeat_views(self, before: Node, views: Iterable[Node], x: Node) -> Node:
        """Insert the views that the nodes `views` make, of `x`."""
        for view in views:
            x = self.insert_view(before, view.target, x, *view.args[1:], **view.kwargs)
        return x

    def replace_by_call(self, node: Node, function: Any, args: Any, kwargs: Any = None) -> Node:
        new = self.insert(node, function, args, kwargs, like=node)
        self.replace(node, new)
        return new

    def replace(self, node: Node, new: Node) -> None:
        node.replace_all_uses_with(new)
        self.erase_unused(node)

    def erase_unused(self, node: Node) -> None:
        """Erase a node without users, and operands that have none then."""
        is_call = node.op in ("call_method", "call_function")
        if is_call and node not in self._erased and not node.users and not changes(node):
            self.erase(node)

    def erase(self, node: Node) -> None:
        """Erase a node that nothing reads, and operands that have no reader then. Another node may do its writes."""
        operands = node.all_input_nodes
        self._changing = [other for other in self._changing if other is not node]
        self._graph.erase_node(node)
        self._erased.add(node)
        for operand in operands:
            self.erase_unused(operand)

    def merge_equal(self) -> None:
        """Let equal views of a value be one, and equal tables of angles, so that the same tables are one value."""
        known: dict[Any, Node] = {}
        for node in list(self._graph.nodes):
            is_true_view = is_view(node) and shares_memory(node, node.args[0])  # `reshape` may have copied
            is_same = is_tensor(node) and (is_true_view or is_part(node) or self._is_constant_table(node))
            if (is_same or operation(node) in _SPLITS) and not self._is_apart(node):
                key = repr((node.op, node.target, node.args, node.kwargs))
                first = known.setdefault(key, node)
                if first is not node:
                    self.replace(node, first)

    def _is_apart(self, node: Node) -> bool:
        """Return whether a value is changed in place, or has no gradient by a `no_grad` in the graph: others differ."""
        is_detached = next((not mode.args[0] for mode in reversed(self._modes) if mode < node), False)
        return is_detached or any(_writes_to(user, node) for user in node.users)

    def _is_constant_table(self, node: Node) -> bool:
        """Return whether a node computes or casts cosines or sines, and no operation or caller writes their memory."""
        angle = node.args[0] if operation(node) == "cast" else node
        if operation(angle) not in ("cos", "sin") or any(user.op == "output" for user in node.users):
            return False
        return not any(angle < other for other in self._changing)

    def is_written(self, node: Node, in_rows: Optional[Tensor] = None, but: Collection[Node] = ()) -> bool:
        """Return whether an operation, other than some, writes to a value or to a view of it.

        With `in_rows`, the value or a view of it as a kernel returns it, contiguous, also whether the layout matters:
        then a write to `x.flatten()` is one to `x`, and results have the layouts of their operands, but for products.
        """
        is_laid_out = in_rows is not None

        def follow(part: Node) -> Iterator[Node]:
            return (u for u in part.users if (operation(u) != "linear" if is_laid_out else shares_memory(u, part)))

        is_safe = in_rows.is_contiguous() if in_rows is not None else not self._changing
        for part in walk(() if is_safe else (node,), follow):
            users = [user for user in part.users if user not in but and not (is_laid_out and _fills(user))]
            if any(_writes_to(user, part) for user in users):
                return True
            readers = {operation(user) or user.op for user in part.users}
            is_returned = "output" in readers and is_tensor(part) and not value(part).is_contiguous()
            if is_laid_out and operation(part) not in _PACKED and (is_returned or _LAID_OUT & readers):
                return True
        return False

    def constant(self, node: Node) -> Any:
        """Return the value of a node that depends on constants alone, which no other writes; None for any other."""
        order = {*walk([node], lambda part: part.all_input_nodes)}
        casts = [part for part in self._changing if "autocast" in operation(part)]
        for part in order:
            name, is_call = operation(part), part.op in ("call_function", "call_method")
            is_known = is_call and (not changes(part) or name in CHANGES)
            is_cast = operation(max((cast for cast in casts if cast < part), default=None)) == "_enter_autocast"
            if not (is_known and order.issuperset(part.all_input_nodes)) or is_cast or RANDOM.search(name):
                return None
        is_written = type(value(node)) not in _PLAIN or any(self.is_written(part, but=order) for part in order)
        interpreter = Interpreter(self.module)
        with contextlib.suppress(Exception):  # which the call itself raises
            for part in () if is_written else sorted(order):
                interpreter.env[part] = interpreter.run_node(part)
        return interpreter.env.get(node)

    def straighten_sums(self) -> None:
        """Compute sums on contiguous rows if only norms and sums read them: norms copy others, as of image patches."""
        for node in self.nodes(iter):
            if operation(node) == "add" and fits(node) and value(node).stride(-1) != 1:
                sums = {*walk([node], lambda part: [u for u in part.users if operation(u) == "add" and fits(u)])}
                if not {operation(user) for part in sums for user in part.users} <= {"add", "layer_norm", "rms_norm"}:
                    continue
                for x in (x for x in node.args if is_tensor(x) and value(x).stride()[-1:] not in ((), (1,))):
                    node.replace_input_with(x, self.insert_view(node, "contiguous", x))
                for part in sorted(sums):
                    part.meta["example_value"] = _result_of(part)

    def remove_copies(self) -> None:
        """Remove operations that return their argument: casts to its dtype, dropouts of nothing, slices of all."""
        for node in self.nodes():
            if is_tensor(node) and returns_its_argument(node) and not any(map(self._is_apart, (node, node.args[0]))):
                self.replace(node, node.args[0])


def _result_of(node: Node) -> Any:
    call = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    return call(*map_arg(node.args, value), **map_arg(node.kwargs, value))  # sizes are nodes, and may be in a tuple


def returns_its_argument(node: Node) -> bool:
    name = operation(node)
    if name == "cast" and dtype_of(node) == dtype_of(node.args[0]):
        return not {"copy", "memory_format"} & {*node.kwargs} and True not in node.args  # which make a new tensor
    index: Any = node.args[1] if name == "getitem" and is_tensor(node.args[0]) else ()
    if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and type(index[1]) is slice:
        return shape_of(node)[-1] == shape_of(node.args[0])[-1]
    return name == "dropout" and bool(node.args) and argument(node, 2, "training", True) is False


def fits(node: Any, *dtypes: torch.dtype) -> bool:
    """Return whether a value is a plain tensor that the kernels compute on: it has rows, of one of the dtypes."""
    x = value(node)
    is_plain = isinstance(node, Node) and type(x) in _PLAIN and x.dim() > 0
    return is_plain and x.dtype in (dtypes or DTYPES) and x.device.type == DEVICE and x.layout == torch.strided


def is_alike(x: Any, *others: Any) -> bool:
    """Return whether values are plain tensors of one shape and dtype."""
    return fits(x) and all(fits(y) and shape_of(y) == shape_of(x) and dtype_of(y) == dtype_of(x) for y in others)


def broadcasts(modulation: Any, x: Any) -> bool:
    """Return whether the kernels broadcast a scale, shift or gate to `x` as Torch does: equal sizes before ones."""
    shape, full = shape_of(modulation), shape_of(x)
    if len(shape) == 1:
        return shape == full[-1:]
    if len(shape) != len(full) or shape[-1] != full[-1]:
        return False
    first = next((index for index, (size, other) in enumerate(zip(shape, full)) if size != other), len(shape))
    return all(size == 1 for size in shape[first:-1])


def is_part(node: Node) -> bool:
    """Return whether a node is a part by numbers, slices, ellipses and new dimensions: of a tensor a view."""
    if operation(node) != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in index)


def shares_memory(node: Node, x: Node) -> bool:
    """Return whether a value is a view of another, or one of them is no tensor."""
    # The tensors inside of a `vmap` have no storage.
    memory = [value(part).untyped_storage()._cdata for part in (node, x) if type(value(part)) in _PLAIN]
    return len({*memory}) < 2


def _fills(node: Node) -> bool:
    return operation(node) == "setitem" and operation(node.args[0]) == "empty_like"


def _writes_to(node: Node, part: Node) -> bool:
    """Return whether a call may write to one of its operands: methods and operators write to the first one."""
    is_method = node.op == "call_method" or operation(node) in CHANGES
    return changes(node) and (not is_method or node.args[0] is part or part in node.kwargs.values())


def is_view(node: Any) -> bool:
    return operation(node) in _VIEWS


def origin(node: Any) -> tuple[Node, list[Node]]:
    """Return the value that a node is a view of, and the views, the last one first."""
    views = []
    while is_view(node):
        views.append(node)
        node = node.args[0]
    return node, views
