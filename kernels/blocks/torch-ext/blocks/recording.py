"""Graphs of the calls of Torch that one forward makes, for CUDA graphs.

The forward runs once on fake tensors, which have no memory: its calls of Torch are recorded, the kernels take the
place of some (`fusions`), and the rest is captured without the model's Python. `graph_runner` drops outdated graphs.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .calls import Refused, is_value, refuse_if
from .kernel_set import DEVICE, PLAIN_TENSORS, is_transformed, off
from .matching import changes

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Recording:
    """The calls of Torch in one forward, and whether it writes into the tensors of its arguments."""

    module: GraphModule  # from the tensors in the arguments to a list of those in the result
    output: Any  # the fake result
    writes_inputs: bool

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for other tensors in the arguments, by the calls of the graph."""
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in PLAIN_TENSORS)
        results = iter(Interpreter(self.module).run(*inputs))
        return tree_map_only(Tensor, lambda _: next(results), self.output)


def record(cls: type, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Recording:
    """Record `forward(*args, **kwargs)` of a model of class `cls`, or raise `Refused`."""
    # Else Torch gives fake tensors an address: 0.
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        writer = _Writer(cls, FakeTensorMode())
    args, kwargs = tree_map(writer.add_input, (args, kwargs))
    try:
        # Compiled and accelerated parts run their own Python, whose calls are recorded.
        stance = torch.compiler.set_stance("force_eager")
        enters = register_module_forward_pre_hook(writer.enter)
        leaves = register_module_forward_hook(writer.leave, always_call=True)
        with stance, off(), enters, leaves, writer.fakes, _Dispatched(writer), writer:
            output = forward(*args, **kwargs)
        writer.follow_autocast()
        inputs = (node.meta["example_value"] for node in writer.graph.nodes if node.op == "placeholder")
        writes_inputs = not writer.written.isdisjoint(fake.untyped_storage()._cdata for fake in inputs)
        writer.graph.output([writer.node_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
    except Exception as error:
        name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
        reason = writer.obstacle or f"{name}{error}".strip().partition("\n")[0]
        raise Refused(f"it cannot be captured: {reason}") from None
    return Recording(GraphModule(writer.constants, writer.graph), output, writes_inputs)


class _Writer(TorchFunctionMode):
    """Writes calls into a graph, in the form in which Dynamo's graphs have them."""

    def __init__(self, cls: type, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.graph = Graph()
        self.constants: dict[str, Any] = {}
        self.obstacle: Optional[str] = None
        self.is_inside = False  # a call of Torch
        self.written: set[int] = set()  # storages, by address: a tensor's version misses writes to its `data`
        self._nodes: dict[int, Node] = {}  # by id of a fake tensor or a constant, which the graph keeps alive
        self._stack: list[tuple[str, type]] = [("", cls)]
        self._owner = threading.get_ident()
        self._autocast = self._around = _autocast_now()
        self._entered: Optional[Node] = None  # into a change of autocast

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        self.is_inside = True
        try:
            args, kwargs = tree_map(self._fake_of, (args, kwargs or {}))
            self.follow_autocast()
            result = function(*args, **kwargs)
            self._write(function, args, kwargs, result)
        finally:
            self.is_inside = False
        return result

    def enter(self, module: nn.Module, _: Any) -> None:
        """Note to which module the next calls belong."""
        if threading.get_ident() == self._owner:  # other threads may run, and record, other models
            self._stack.append((str(id(module)), type(module)))

    def leave(self, *_: Any) -> None:
        if threading.get_ident() == self._owner:
            self._stack.pop()

    def follow_autocast(self) -> None:
        """Write a change of autocast since the last call, as Dynamo does."""
        now = _autocast_now()
        if now == self._autocast:
            return
        self._autocast = now
        if self._entered is not None:
            self.graph.call_function(_exit_autocast, (self._entered,))
        is_around = now == self._around
        self._entered = None if is_around else self.graph.call_function(_enter_autocast, (DEVICE, *now))

    def add_input(self, leaf: Any) -> Any:
        """Return the fake tensor of an input, or another leaf of the arguments."""
        if type(leaf) not in PLAIN_TENSORS:
            return leaf
        with self.fakes:
            fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        self._name_result(self.graph.placeholder(f"input_{len(self._nodes)}"), fake)
        return fake

    def node_of(self, tensor: Tensor) -> Node:
        """Return the node of a tensor, which is a constant if no call has made it."""
        return self._nodes[id(self._fake_of(tensor))]

    def _fake_of(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            refuse_if((id(leaf) not in self._nodes, "it reads a tensor whose origin is not known"))
            return leaf
        if not isinstance(leaf, Tensor):
            return leaf
        refuse_if((type(leaf) not in PLAIN_TENSORS, f"it reads a {type(leaf).__name__}"))
        node = self._constant(leaf)
        if "example_value" not in node.meta:
            self._name_result(node, self.fakes.from_tensor(leaf))
        return node.meta["example_value"]

    def _write(self, function: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if not _has_tensors(result) and not _has_tensors((args, kwargs)):
            return  # a setting, such as the mode of gradients
        refuse_if((is_transformed(), "it uses a transform of torch.func"))
        kind, target, args = _call_of(function, args)
        if not _has_tensors(result) and not changes(Node(self.graph, "", kind, target, (), {})):
            return  # a size or a dtype
        arguments: Any = map_aggregate((args, kwargs), self._argument)
        node = self.graph.create_node(kind, target, *arguments)
        path, cls = self._stack[-1]
        node.meta["nn_module_stack"] = {path: (path, cls)}
        is_known = all(id(leaf) in self._nodes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if changes(node) or not is_known:
            self._name_results(node, result)
        else:
            self.graph.erase_node(node)  # it returned its argument

    def _name_results(self, node: Node, result: Any) -> None:
        if isinstance(result, Tensor) and id(result) not in self._nodes:
            self._name_result(node, result)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                if _has_tensors(part):
                    inner = self.graph.call_function(operator.getitem, (node, index))
                    inner.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                    self._name_results(inner, part)

    def _name_result(self, node: Node, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
            raise Refused(f"it makes a {type(tensor).__name__}, {tensor.layout}")
        self._nodes[id(tensor)] = node
        node.meta["example_value"] = tensor

    def _argument(self, value: Any) -> Any:
        """Return a node, or the value, for a leaf of the arguments of a call."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, type) and value in _DTYPES:
            return _DTYPES[value]
        if isinstance(value, torch.Generator):
            return self._constant(value)
        is_known = value is Ellipsis or is_value(value)
        refuse_if((not is_known, f"an argument of a call is a {type(value).__name__}"))
        return value

    def _constant(self, value: Any) -> Node:
        if id(value) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = value
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                self._nodes[id(value)] = self.graph.get_attr(name)
        return self._nodes[id(value)]


class _Dispatched(TorchDispatchMode):
    """Refuses operations of Torch from outside of recorded calls, as those that a C++ extension makes."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        if not self._writer.is_inside and function.namespace != "prim":  # the device of a fake tensor
            self._writer.obstacle = f"other code than Python calls {function}"
        elif torch.Tag.inplace_view in function.tags:
            self._writer.obstacle = f"it changes the shape of a tensor in place ({function})"
        refuse_if((self._writer.obstacle is not None, self._writer.obstacle))
        for argument in function._schema.arguments if function._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = dict(zip((argument.name for argument in function._schema.arguments), args)) | (kwargs or {})
                tensors = (leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor))
                self._writer.written.update(tensor.untyped_storage()._cdata for tensor in tensors)
        return function(*args, **(kwargs or {}))


def _autocast_now() -> tuple[torch.dtype, bool]:
    return torch.get_autocast_dtype(DEVICE), torch.is_autocast_enabled(DEVICE)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _call_of(function: Any, args: Sequence[Any]) -> tuple[str, Any, tuple]:
    """Return a node's kind, its target and its arguments for a call."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], function.__self__.__name__)
    if name == "__set__":
        raise Refused(f"it sets {function.__self__.__name__} of a tensor")
    if getattr(Tensor, name, None) is function:
        return "call_method", name, tuple(args)
    return "call_function", function, tuple(args)
