"""Graphs of the calls of Torch that one forward makes, for CUDA graphs.

A CUDA graph repeats the kernels of one call, whatever the Python of the model would do the next time. The calls of
Torch in that call are recorded while it is captured, the kernels take the place of some (`fusions`), and the rest is
captured again without the model's Python. Nothing is guarded here: `graph_runner` decides when a graph is out of date.
"""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from .editing import is_view
from .kernel_set import DEVICE, PLAIN_TENSORS, is_transformed
from .values import changes, operation

_VALUES = (
    *(type(None), type(...), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}
# Addresses are given to kernels that Torch does not see.
_ADDRESSES = {"data_ptr", "__dlpack__", "__cuda_array_interface__", "untyped_storage", "storage", "numpy"}


_thread = threading.local()


def is_recording() -> bool:
    """Return whether this thread records a forward."""
    return getattr(_thread, "is_recording", False)


class Unrecorded(Exception):
    """The calls of Torch are not all that the forward does. The text says why."""


class Recording:
    """The calls of Torch in one forward.

    Attributes:
        module: The graph of the calls. Its placeholders are the tensors of the forward's arguments, and the parts of
            the result are returned as a list.
        obstacle: Why the graph does less than the forward, or None.
    """

    def __init__(self, cls: type) -> None:
        self.obstacle: Optional[str] = None
        self.module: GraphModule = GraphModule({}, Graph())
        self._cls = cls

    def record(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of `forward(*args, **kwargs)`, whose calls make up the graph."""
        writer = _Writer(self._cls)
        for tensor in _plain_in((args, kwargs)):
            writer.add_input(tensor)
        _thread.is_recording = True
        try:
            # Compiled parts run their own Python, whose calls are recorded.
            with torch.compiler.set_stance("force_eager"), writer.modules(), _Dispatched(writer), writer:
                output = forward(*args, **kwargs)
        finally:
            _thread.is_recording = False
        self.obstacle = writer.obstacle
        if self.obstacle is None:
            self._end(writer, output)
        return output

    def _end(self, writer: "_Writer", output: Any) -> None:
        self._leaves, self._structure = tree_flatten(output)
        self._places = [index for index, leaf in enumerate(self._leaves) if type(leaf) in PLAIN_TENSORS]
        try:
            writer.graph.output([writer.node_of(self._leaves[index]) for index in self._places])
        except Unrecorded as unrecorded:
            self.obstacle = str(unrecorded)
            return
        for index in self._places:
            self._leaves[index] = None
        self.module = GraphModule(writer.constants, writer.graph)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for other tensors in the arguments, by the calls of the graph."""
        leaves = [*self._leaves]
        for index, tensor in zip(self._places, Interpreter(self.module).run(*_plain_in((args, kwargs)))):
            leaves[index] = tensor
        return tree_unflatten(leaves, self._structure)


class _Writer(TorchFunctionMode):
    """Writes calls into a graph, in the form in which Dynamo's graphs have them."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, Any] = {}
        self.obstacle: Optional[str] = None
        self.is_inside = False  # a call of Torch
        self.made: set[int] = set()  # addresses of new memory
        self._fakes = torch._subclasses.FakeTensorMode()
        self._nodes = WeakIdKeyDictionary()  # by tensor
        self._constants: dict[int, Node] = {}  # by id of an object that `constants` keeps alive
        self._unwritten: dict[Node, Node] = {}  # new memory and views of it, by what made it
        self._stack: list[tuple[str, type]] = [("", cls)]
        self._autocast = torch.is_autocast_enabled(DEVICE)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        self.is_inside = True
        try:
            result = function(*args, **kwargs)
            if self.obstacle is None:
                self._write(function, args, kwargs, result)
        except Unrecorded as unrecorded:
            self.obstacle = str(unrecorded)
        finally:
            self.is_inside = False
        return result

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Note which module each call belongs to."""
        before = register_module_forward_pre_hook(lambda module, _: self._enter(module))
        after = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module) -> None:
        if is_recording():  # other threads may run other models
            self._stack.append((str(id(module)), type(module)))

    def _leave(self) -> None:
        if is_recording():
            self._stack.pop()

    def add_input(self, tensor: Tensor) -> None:
        self._name_result(self.graph.placeholder(f"input_{len(self._nodes)}"), tensor)

    def node_of(self, tensor: Tensor) -> Node:
        node = self._nodes.get(tensor)
        return self._constant(tensor) if node is None else node

    def _write(self, function: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if _name_of(function) in _ADDRESSES:
            raise Unrecorded(f"it gives addresses of tensors to other code ({_name_of(function)})")
        if not _has_tensors(result) and not _has_tensors((args, kwargs)):
            return  # a setting, such as the mode of gradients
        if torch.is_autocast_enabled(DEVICE) != self._autocast:
            raise Unrecorded("it changes autocast")
        if is_transformed():
            raise Unrecorded("it uses a transform of torch.func")
        kind, target, args = _call_of(function, args)
        if not _has_tensors(result) and not changes(Node(self.graph, "", kind, target, (), {})):
            return  # a size, a dtype, or a number that a capture does not allow to read
        node = self.graph.create_node(
            kind, target, map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        )
        path, cls = self._stack[-1]
        node.meta["nn_module_stack"] = {path: (path, cls)}
        self._watch_memory(node)
        if changes(node) or any(
            self._nodes.get(tensor) is None for tensor in tree_leaves(result) if isinstance(tensor, Tensor)
        ):
            self._name_results(node, result)
        else:
            self.graph.erase_node(node)  # it returned its argument

    def _watch_memory(self, node: Node) -> None:
        """Raise if a call reads memory that no recorded call has written."""
        if operation(node) in _EMPTY:
            self._unwritten[node] = node
            return
        for operand in node.all_input_nodes:
            memory = self._unwritten.get(operand)
            if memory is not None and (is_view(node) or operation(node) == "getitem"):
                self._unwritten[node] = memory
            elif memory is not None and changes(node):
                self._unwritten = {view: made for view, made in self._unwritten.items() if made is not memory}
            elif memory is not None:
                raise Unrecorded("it reads memory that no call of Torch has written")

    def _name_results(self, node: Node, result: Any) -> None:
        if isinstance(result, Tensor):
            if self._nodes.get(result) is None:
                self._name_result(node, result)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                if _has_tensors(part):
                    inner = self.graph.call_function(operator.getitem, (node, index))
                    inner.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                    self._name_results(inner, part)

    def _name_result(self, node: Node, tensor: Tensor) -> None:
        if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided:
            raise Unrecorded(f"it makes a {type(tensor).__name__}, {tensor.layout}")
        self._nodes[tensor] = node
        with self._fakes, torch._C.DisableTorchFunction():
            node.meta["example_value"] = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device=tensor.device,
                requires_grad=tensor.requires_grad,
            )

    def _argument(self, value: Any) -> Any:
        """Return a node, or the value, for a leaf of the arguments of a call."""
        if type(value) in PLAIN_TENSORS:
            return self.node_of(value)
        if isinstance(value, type) and value in _DTYPES:
            return _DTYPES[value]
        if isinstance(value, torch.Generator):
            return self._constant(value)
        if type(value) not in _VALUES:
            raise Unrecorded(f"an argument of a call is a {type(value).__name__}")
        return value

    def _constant(self, value: Any) -> Node:
        node = self._constants.get(id(value))
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.made:
            raise Unrecorded("it reads a tensor whose origin is not known")
        if node is None:
            name = f"constant_{len(self._constants)}"
            self.constants[name] = value
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first):
                node = self._constants[id(value)] = self.graph.get_attr(name)
            if isinstance(value, Tensor):
                self._name_result(node, value)
        return node


class _Dispatched(TorchDispatchMode):
    """Notices operations of Torch from outside of recorded calls, as those that a C++ extension makes."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__()
        self._writer = writer

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        if not self._writer.is_inside and self._writer.obstacle is None:
            self._writer.obstacle = f"other code than Python calls {function}"
        result = function(*args, **(kwargs or {}))
        self._writer.made |= _addresses_of(result) - _addresses_of((args, kwargs))
        return result


def _plain_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if type(leaf) in PLAIN_TENSORS]


def _addresses_of(value: Any) -> set[int]:
    """Return the addresses of the memory of tensors, without those that have none."""
    plain = (tensor for tensor in _plain_in(value) if tensor.layout == torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in plain} - {0}


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") if name in ("__get__", "__set__") else name


def _call_of(function: Any, args: Sequence[Any]) -> tuple[str, Any, tuple]:
    """Return a node's kind, its target and its arguments for a call."""
    name = _name_of(function)
    if getattr(function, "__name__", "") == "__get__":
        return "call_function", getattr, (args[0], name)
    if getattr(function, "__name__", "") == "__set__":
        raise Unrecorded(f"it sets {name} of a tensor")
    if getattr(Tensor, name, None) is function:
        return "call_method", name, tuple(args)
    return "call_function", function, tuple(args)
