"""Models and blocks by Dynamo: Torch traces the forward, and the kernels take the place of operations in its graph.

`torch.compile` calls the back end with a graph of Torch's own calls, and guards it: the graph runs only while inputs,
modules, hooks, modes and global names are as they were when it was traced. Inductor has no part in it.
"""

import copy
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from traceback import walk_tb
from types import CodeType, FunctionType, MethodType
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.utils import counters
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.nn.modules.module import _has_any_global_hook

from .comparison import compare_graphs
from .fusions import fuse
from .kernel_set import is_forward_mode, is_off, is_transformed, is_watched
from .report import Report

_PATCHED = "the method of a class was patched after accelerate"
_NUMBERED = 'blocks have numbers in a cache, by which Torch traces each apart: scope="model" or graphs=True traces them'
_PAGED = "generate_batch: its cache breaks each trace at every layer"
# A first call takes 0.2 to 0.4 s a block, 10 s for so many (H200). The GPU limits calls of longer models, not the host.
_MANY = 28
# Sizes of a growing cache and of an encoder's results, which the first trace has as symbols: they differ between calls.
_GROWING = r"L\['kwargs'\].*\.(keys|values|cumulative_length)$,.*L\['kwargs'\]\['(logits_to_keep|encoder_outputs)'\]"
_numbers = itertools.count()
_codes: "weakref.WeakKeyDictionary[type, CodeType]" = weakref.WeakKeyDictionary()
# The modules of a model that run by graphs. No value may refer to the model.
_traced: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]]" = weakref.WeakKeyDictionary()


def trace(model: nn.Module, report: Report, scope: Optional[str], logits: bool = True, check: bool = False) -> None:
    """Let a model, or its blocks by `scope`, run by graphs with the kernels, from the next call on."""
    groups = [*_groups_in(model)]
    blocks = {block for group in groups for block in group if [*block.children()]}
    is_long = len(blocks) > _MANY and len({*map(_kind, blocks)}) <= dynamo_config.recompile_limit
    by_blocks = scope == "blocks" or (scope is None and logits and is_long)
    groups = groups if by_blocks else [[model]]
    for modules in groups:
        compiled = _compiled(modules, _Backend(type(modules[0]), report, by_blocks, logits, check))
        for module in modules:
            call: Any = partial(compiled, module)
            vars(call).update(former=module._compiled_call_impl, has_run=False, obstacle="")
            module._compiled_call_impl = call  # the place of `nn.Module.compile`'s: Torch has no public name for it
    _traced[model] = weakref.WeakSet(itertools.chain(*groups))


def untrace(model: nn.Module) -> None:
    """Undo `trace`."""
    for module in _traced.pop(model, ()):
        while hasattr(call := module._compiled_call_impl, "former"):  # a module may stand in lists twice
            module._compiled_call_impl = call.former
        if module._compiled_call_impl is None:
            vars(module).pop("_compiled_call_impl", None)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return the class, rates and names of a block and its number in a cache: Torch traces blocks of a kind once."""
    values = (item for part in block.modules() for item in vars(part).items())
    return type(block), *(value for name, value in values if name == "layer_idx" or isinstance(value, (float, str)))


def _groups_in(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules of each class in each of the outermost lists of a model."""
    for part in model.children():
        if isinstance(part, nn.ModuleList):
            yield from ([module for module in part if type(module) is cls] for cls in dict.fromkeys(map(type, part)))
        else:
            yield from _groups_in(part)


def _compiled(modules: Sequence[nn.Module], backend: "_Backend") -> Callable[..., Any]:
    """Return the call of modules of one class, by graphs that they share."""
    keys, methods = _methods_in(modules)

    def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Torch counts the graphs of a code object, up to 8, and traces sizes as symbols that differ between calls of one
    # name in a file. `traced` has a code object and a name for each model and each list of blocks; `call`, which a
    # user's `torch.compile` traces, for each class.
    traced.__code__ = traced.__code__.replace(co_name=(name := f"{backend.cls.__name__}_{next(_numbers)}"))
    compiled = torch.compile(traced, backend=backend)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Who compiles the model gets its own operations, which Inductor fuses. TorchScript traces nothing compiled.
        if is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return module._call_impl(*args, **kwargs)
        own: Any = module._compiled_call_impl
        if is_off() or is_watched() or _has_any_global_hook():  # a mode would see its own trace; hooks have no guards
            return (own.former or module._call_impl)(*args, **kwargs)
        is_patched = list(map(getattr, *keys)) != methods
        has_cache = backend.is_block and any(hasattr(value, "get_seq_length") for value in kwargs.values())
        is_paged = any(type(value).__name__ == "PagedAttentionCache" for value in kwargs.values())
        if reason := _PATCHED if is_patched else _PAGED if is_paged else _NUMBERED if has_cache else own.obstacle:
            backend.report.left[backend.cls.__name__, reason] = 1
            return module._call_impl(*args, **kwargs)
        if backend.is_block:
            args, kwargs = tuple(map(_unsliced, args)), {key: _unsliced(value) for key, value in kwargs.items()}
        hooks = dynamo_config.patch(skip_nnmodule_hook_guards=False)  # they may be added after the trace
        grows = any([*map(_grows, kwargs.values())])
        sizes = torch.compiler.config.patch(dynamic_sources=_GROWING) if grows else nullcontext()  # type: ignore[attr-defined]
        has_run, own.has_run = own.has_run, True
        try:
            with hooks, sizes, nullcontext() if has_run else _first_call():
                return compiled(module, *args, **kwargs)
        except TorchRuntimeError as error:  # of fake tensors: the model may catch those of real ones, or raise none
            if any(frame.f_code.co_name == name for frame, _ in walk_tb(error.__traceback__)):
                raise  # a part of the model has run
        result = module._call_impl(*args, **kwargs)
        own.obstacle = "an operation fails on fake tensors, by which Torch traces"
        return result

    call.__code__ = _codes.setdefault(backend.cls, call.__code__.replace(co_name=f"call_{name}"))
    return call


def _unsliced(value: Any) -> Any:
    """Return a batch of one sample with the strides of its sample: Torch would trace a block again for a slice's."""
    if type(value) is Tensor and value.layout is torch.strided and value.dim() > 1 and value.size(0) == 1:
        return value if value.stride(0) == value.size(1) * value.stride(1) else value[0][None]
    return value


def _grows(value: Any) -> bool:
    """Return whether a value is a cache that grows, and make its tensors contiguous: Torch traces views apart."""
    grows = not getattr(value, "is_compileable", True)  # the protocol of transformers' caches: their tensors stay
    for layer, name in itertools.product(getattr(value, "layers", None) or () if grows else (), ("keys", "values")):
        # Its next call replaces the tensors; layers of other classes may keep them.
        if type(layer).__name__ == "DynamicLayer" and isinstance(tensor := getattr(layer, name), Tensor):
            setattr(layer, name, tensor.contiguous())
    return grows


@contextmanager
def _first_call() -> Iterator[None]:
    """Trace without garbage collections (13 % of the time of Wan's trace) and the model's lines of each node (4 %)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with dynamo_config.patch(run_gc_after_compile=False), preserve_node_meta():
            set_stack_trace(["blocks"])
            yield
    finally:
        gc.collect(1)  # while the GPU computes
        if was_enabled:
            gc.enable()


def _methods_in(modules: Sequence[nn.Module]) -> tuple[Any, list[Any]]:
    """Return classes and names of methods that calls run, and the methods: Torch's guards compare the classes alone."""
    parts = [part for module in modules for part in module.modules()]
    methods: dict[tuple[type, str], Any] = {}
    for owner in {type(value) for part in parts for value in (part, *filter(callable, vars(part).values()))}:
        own = {name for cls in owner.__mro__ if cls not in (nn.Module, object) for name in vars(cls)}
        methods |= {(owner, name): getattr(owner, name, None) for name in (*own, "forward", "__call__")}
    methods = {key: value for key, value in methods.items() if isinstance(value, (FunctionType, MethodType))}
    return [*zip(*methods), itertools.repeat(None)], [*methods.values()]


class _Backend:
    """The function that `torch.compile` calls with each graph of one model, or of one class of blocks."""

    def __init__(self, cls: type, report: Report, is_block: bool, logits: bool, check: bool) -> None:
        self.cls, self.report, self.is_block, self._returns_logits, self._check = cls, report, is_block, logits, check
        self._breaks = Counter(counters["graph_break"])

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        breaks = Counter(counters["graph_break"])
        for reason, number in (breaks - self._breaks).items():
            self.report.left["graph break", reason.strip().partition("\n")[0]] += number
        self._breaks = breaks
        graph = copy.deepcopy(module.graph)
        own = cache(lambda: GraphModule(module, graph))  # few calls need it, and its code takes time
        # Behind a break, here or in a caller, the model's own Python may read them.
        causes = {name for name, _ in self.report.left}
        is_broken = vars(module)["compile_subgraph_reason"].graph_break or "graph break" in causes
        returns_logits = self._returns_logits or is_broken
        parts = (part for part in module.modules() if isinstance(part, GraphModule))  # also bodies of checkpoints
        fused = [(part, fuse(part, returns_logits)) for part in parts]
        if self._check:
            is_kept, text = compare_graphs(own(), module, inputs)
            self.report.checks.append(f"{self.cls.__name__}: {text}")
            if not is_kept:
                self.report.left[self.cls.__name__, "the check kept the traced operations"] += 1
                return own().forward
        for part, misses in fused:
            self.report.add(part.graph, misses, self.cls, owner=str(id(self)))

        def run(*args: Any) -> Any:
            # The kernels have no forward mode, and their formulas for transforms are the model's own operations.
            return (own() if is_forward_mode() or is_transformed() else module).forward(*args)

        return run
