"""Faster forwards for modules, and how they are found, put into a module and taken out.

The class of a module with a replacement is one that is derived from its own. Parameters, hooks, `state_dict`,
`isinstance`, copies and all other methods stay those of the module.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Optional

from torch import Tensor, nn

from .deferred import now
from .function_code import functions_used, innermost, methods_of, rewrapped
from .kernel_set import takes, takes_tensors
from .norms import NormForm, normalized, recognized_norm
from .probes import has_hooks, is_bound, is_rewritten, watched_forward
from .projections import gelu_fits_epilogue, linear_gelu, projection_in
from .rewriting import Rewriting, rewritten


@dataclass(frozen=True, eq=False)  # one for each class and formula
class Replacement:
    """A faster forward.

    Attributes:
        does: The forward's operations in kernels, for the report.
        kernels: The names of the kernels that the forward calls, without those of replaced modules inside.
        compute: Gets the module and the only argument of its forward, and returns the result, or None where the kernels
            cannot compute it; or None where `methods` are given.
        norm: A norm's formula.
        methods: The class's own methods, rewritten.
        misses: The forward's operations without a kernel, and the reasons.
    """

    does: str
    kernels: tuple[str, ...]
    compute: Optional[Callable[[nn.Module, Tensor], Optional[Tensor]]] = None
    norm: Optional[NormForm] = None
    methods: Mapping[str, FunctionType] = field(default_factory=dict)
    misses: tuple[str, ...] = ()


def find(module: nn.Module) -> tuple[Optional[Replacement], Optional[str]]:
    """Return the replacement for a module, if there is one, and why the module keeps its own forward, if it must."""
    form = recognized_norm(module)
    projection = projection_in(module) if form is None else None
    if form is not None:
        replacement, reason = _of_norm(form), None
    elif projection is not None:
        replacement, reason = _of_projection(projection), None
    else:
        replacement, reason = _rewritten(module)
    return replacement, reason if replacement is None else _reason_of_instance(module)


def _reason_of_instance(module: nn.Module) -> Optional[str]:
    if is_rewritten(module) and not hasattr(module, "_hf_hook"):
        return "its forward was replaced by other code"
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    # Hooks cannot be probed. These only look at the outputs, for `output_hidden_states`.
    if all(getattr(hook, "__module__", "") == "transformers.utils.output_capturing" for hook in hooks):
        return "it has hooks" if module._backward_hooks or module._backward_pre_hooks else None
    return "it has hooks"


def is_foreign(function: Any, cls: type) -> bool:
    """Return whether a method of a class of a library, or a decorator of it, is neither the library's nor Torch's."""
    libraries = {base.__module__.partition(".")[0] for base in cls.__mro__} | {"kernels"}
    while True:
        if isinstance(function, nn.Module):  # kernels makes modules of functions
            function = type(function).forward
        names = getattr(function, "__globals__", None)
        if names is not None and str(names.get("__name__")).partition(".")[0] not in libraries:
            return True
        if not hasattr(function, "__wrapped__"):
            return names is None
        function = function.__wrapped__


@functools.cache
def _of_norm(form: NormForm) -> Replacement:
    does = "LayerNorm" if form.centered else "RMSNorm"
    return Replacement(does, (form.kernel,), lambda norm, x: normalized(form, norm, x), norm=form)


@functools.cache
def _of_projection(name: str) -> Replacement:
    def compute(module: nn.Module, x: Tensor) -> Optional[Tensor]:
        projection = module._modules[name]
        return linear_gelu(projection, x) if gelu_fits_epilogue(projection, x) else None

    return Replacement("GELU in the epilogue of its projection", (), compute)


_rewritings: dict[Hashable, tuple[Optional[Replacement], Optional[str]]] = {}


def _rewritten(module: nn.Module) -> tuple[Optional[Replacement], Optional[str]]:
    """Return a replacement with the methods of a module's class, rewritten, or why it is left, or neither."""
    cls = type(module)
    if not methods_of(cls):
        return None, None
    processor = getattr(module, "processor", None)
    key = (
        *(cls, type(processor), _call_of(processor), *methods_of(cls).values()),
        functions_used(cls, _call_of(processor)),
        # A norm or an activation that is patched for a while is none then.
        tuple((name, *_state_of(child)) for name, child in module._modules.items()),
        tuple((name, value) for name, value in vars(module).items() if type(value) is bool),
    )
    if key not in _rewritings:
        _rewritings[key] = _rewrite(module)
    return _rewritings[key]


def _state_of(child: Optional[nn.Module]) -> tuple[Any, ...]:
    if child is None:
        return (None,)
    return type(child), type(child).forward, is_rewritten(child), has_hooks(child)


def _rewrite(module: nn.Module) -> tuple[Optional[Replacement], Optional[str]]:
    methods: dict[str, FunctionType] = {}
    does: dict[str, set[str]] = {}
    of_norms: set[str] = set()
    reasons: list[str] = []
    processing = _rewritten_processor(module, reasons)
    for name, method in methods_of(type(module)).items():
        inner = innermost(method)
        if inner is None or (is_foreign(method, type(module)) and name == "forward"):
            return None, "its forward was replaced by other code"
        if rewrapped(method, inner, inner) is None:
            continue
        new = rewritten(inner, {next(iter(inspect.signature(inner).parameters), "self"): module}, processing)
        reasons += new.misses
        if new.function is not None:
            methods[name] = new.function
            of_norms |= new.norms
            for operation, kernels in new.does.items():
                does.setdefault(operation, set()).update(kernels)
    misses = tuple(dict.fromkeys(reasons))
    if not methods:
        return None, "; ".join(misses) or None
    kernels = tuple(sorted(of_norms.union(*does.values())))
    return Replacement("; ".join(does), kernels, methods=methods, misses=misses), None


def _call_of(processor: Any) -> Any:
    return vars(type(processor)).get("__call__")


def _rewritten_processor(module: nn.Module, reasons: list[str]) -> Optional[Rewriting]:
    """Return the call of an attention processor of diffusers, rewritten, or None."""
    processor = getattr(module, "processor", None)
    present = _call_of(processor)
    inner = innermost(present)
    if inner is None or isinstance(processor, nn.Module):
        return None
    if is_foreign(present, type(module)):
        reasons.append(f"its {type(processor).__name__}.__call__ was replaced by other code")
        return None
    new = rewritten(inner, dict(zip(inspect.signature(inner).parameters, (processor, module))))
    reasons += new.misses
    if new.function is None:
        return None
    call = rewrapped(present, inner, new.function)

    def process(processor: Any, *args: Any, **kwargs: Any) -> Any:
        is_same = type(processor).__call__ is present
        return call(processor, *args, **kwargs) if is_same else processor(*args, **kwargs)

    return replace(new, function=process)


def put(module: nn.Module, replacement: Replacement) -> None:
    """Give `module` the faster forward."""
    set_class(module, _join(replacement, type(module)))


def take_out(module: nn.Module) -> None:
    """Give `module` its own class back, if it has a faster forward."""
    if replacement_in(module) is not None:
        set_class(module, _own_class(type(module)))


def replacement_in(module: nn.Module) -> Optional[Replacement]:
    """Return the replacement that was put into `module`, or None."""
    return getattr(type(module), "_blocks_replacement", None)


def original_class(module: nn.Module) -> type:
    """Return the class that `module` had before its replacement, and before later wrappers of its class."""
    return getattr(type(module), "_blocks_original", type(module))


def _own_class(cls: type) -> type:
    """Return `cls` with the original class in place of the joined one: `fully_shard` derives a class from that."""
    if "_blocks_original" in vars(cls):
        return cls._blocks_original
    if not hasattr(cls, "_blocks_original"):
        return cls
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(_own_class(base) for base in cls.__bases__), namespace)


def set_class(module: nn.Module, cls: type) -> None:
    """Set the class of a module, and of its forward where wrappers keep that bound."""
    # The hooks of accelerate, which move weights between devices, keep the bound forward that they found, and leave it
    # in the module when they are removed.
    bound = [name for name in ("forward", "_old_forward") if is_bound(module, module.__dict__.get(name))]
    module.__class__ = cls
    for name in bound:
        module.__dict__[name] = MethodType(cls.forward, module)


class _Copied:
    """The common part of classes with a replacement."""

    def __reduce_ex__(self, protocol: int) -> Any:
        # Pickled as a module of its own class, so that loading needs no kernels.
        _, _, *state = super().__reduce_ex__(protocol)
        return object.__new__, (_own_class(type(self)),), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Copied":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def derived(cls: type, attributes: dict[str, Any]) -> type:
    """Return a class that is derived from `cls` and looks like it, with other attributes."""
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    marks = {"_blocks_original": getattr(cls, "_blocks_original", cls)}
    bases = (cls,) if issubclass(cls, _Copied) else (_Copied, cls)
    return type(cls)(cls.__name__, bases, {**names, **marks, **attributes})


@functools.cache
def _join(replacement: Replacement, original: type) -> type:
    joined = derived(original, {"_blocks_replacement": replacement, "_blocks_norm": replacement.norm})
    for name, new in replacement.methods.items():
        setattr(joined, name, _dispatched(joined, original, name, new))
    if replacement.compute is not None:
        joined._blocks_watched = watched_forward(original)
        joined.forward = _guarded(joined, original, replacement.compute)
    _register(joined, original)
    return joined


def _register(joined: type, original: type) -> None:
    """Let the caches of diffusers, which look up a block by its exact class, know a joined one."""
    if original.__module__.partition(".")[0] != "diffusers":
        return
    try:
        registry = importlib.import_module("diffusers.hooks._helpers").TransformerBlockRegistry
        registry.register(joined, copy.copy(registry.get(original)))
    except (ImportError, AttributeError, ValueError):  # another release, or not a block
        return


def _guarded(joined: type, original: type, compute: Callable[[nn.Module, Tensor], Optional[Tensor]]) -> Callable:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = None
        # Wrappers keep the bound forward that they found, and call it after the module was restored, too.
        if len(args) == 1 and not kwargs and isinstance(self, joined) and takes(args[0]):
            result = compute(self, args[0]) if joined._blocks_watched.are_unchanged() else None
        return original.forward(self, *args, **kwargs) if result is None else result

    return forward


def _dispatched(joined: type, original: type, name: str, new: FunctionType) -> Callable:
    """Return a method with the decorators of the original one, which runs `new`."""
    method = getattr(original, name)
    inner = innermost(method)

    @functools.wraps(inner)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        present = inner
        if isinstance(self, joined) and takes_tensors():
            present = getattr(original, name)
            if present is method:
                return new(self, *args, **kwargs)
        return present(self, *map(now, args), **kwargs)

    dispatch.takes_deferred = new.takes_deferred
    return rewrapped(method, inner, dispatch)
