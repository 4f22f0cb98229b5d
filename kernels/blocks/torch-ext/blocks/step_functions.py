"""Replacements of Torch's functions and of transformers' attention in a decoding step.

The products of a step have few rows, and its attention one token: the kernels of decode read weights and cached states
once, at the speed of the memory. They take the place of `torch.nn.functional.linear`, whichever module calls it, while
a step runs. transformers asks for attention functions by name, and takes new ones: in a step the model's configuration
names `attend`.

This module imports transformers: import it only for a model of transformers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .generation_cache import FixedCache
from .kernel_set import PLAIN_TENSORS, decode, takes

_NAME = "blocks_decoding"
_ROWS = 8  # that the kernels of decode take
_ELEMENTS = 256  # of a head, at most
_ROTATED_ELEMENTS = (64, 128, 256)  # of a head that attention rotates itself
_thread = threading.local()


class Products:
    """The products with weights in a step, and the operations that follow them.

    A first forward, whose results are dropped, finds out which products have the same input, as those of q, k and v:
    one kernel computes them. It also finds out which are added to a residual, and which are the two sides of a gate.
    In steps these wait for the sum or the gate, which one kernel computes with them. If something else happens to
    them, they are computed first.

    Attributes:
        is_known: Whether that forward has run.
    """

    def __init__(self) -> None:
        self.is_known = False
        # By id of a weight. The weights are kept, so that no other tensor gets their ids.
        self._groups: dict[int, list[_Layer]] = {}
        self._waiting: dict[int, Tensor] = {}

    def functions(self) -> "_Functions":
        """Return the functions of one step, or of the forward before the first."""
        return _Functions(self._groups, self._waiting) if self.is_known else _FirstFunctions(self)

    def learn(self, groups: list[list["_Layer"]], waiting: list[Tensor]) -> None:
        """Take the results of the first forward."""
        self._waiting = {id(weight): weight for weight in waiting}
        groups = [group for group in groups if len(group) > 1 and id(group[0][0]) not in self._waiting]
        self._groups = {id(group[0][0]): group for group in groups}
        self.is_known = True


_Layer = tuple[Tensor, Optional[Tensor]]  # weight and bias
_ADDITIONS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}
# Functions that do not read the elements of a tensor.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "is_cpu", "is_cuda", "layout", "ndim", "requires_grad", "shape")
}
_METADATA |= {Tensor.dim, Tensor.element_size, Tensor.is_contiguous, Tensor.numel, Tensor.size, Tensor.stride}


@dataclass
class _Product:
    """A product that waits: `out` has no elements yet."""

    out: Tensor
    x: Tensor
    weight: Tensor
    bias: Optional[Tensor]

    def compute(self) -> None:
        self.out.copy_(_product(self.x, self.weight, self.bias))


@dataclass
class _Rotation:
    """A rotation of q and k that waits: `outs` have no elements yet, and views of them may have been made.

    Attributes:
        function, args: rope3d's op, and its arguments.
    """

    outs: tuple[Tensor, Tensor]
    function: Any
    args: tuple

    def compute(self) -> None:
        for out, result in zip(self.outs, self.function(*self.args)):
            out.copy_(result)

    def for_attention(self) -> Optional[dict[str, Any]]:
        """Return q and k, [batch, heads, 1, elements], and the options by which `decode.attention` rotates, or None."""
        given = dict(zip(_ROTATIONS[_name_of(self.function)], self.args))
        q, k, cos, sin = (given[name] for name in ("q", "k", "cos", "sin"))
        width, with_norm = q.shape[-1], "eps" in given
        weights = given.get("q_weight"), given.get("k_weight")
        unusual = any(given.get(name) for name in ("per_token", "prefix", "head_dim", "inverse"))
        if unusual or not given.get("half") or given["rotary_dim"] not in (0, width) or width not in _ROTATED_ELEMENTS:
            return None
        if with_norm and any(weight is None for weight in weights):
            return None
        if any(tensor.dtype != q.dtype for tensor in (cos, sin, *weights) if tensor is not None):
            return None
        if cos.dim() == 3:
            cos, sin = cos[:, 0], sin[:, 0]
        options = {"cos": cos, "sin": sin}
        if with_norm:
            options |= dict(
                zip(("query_weight", "key_weight"), weights), eps=given["eps"], offset=given.get("offset", 0.0)
            )
            options["rounding"] = "before_weight" if given.get("rounded_before_weight") else "last"
        q, k = (x if given["heads_first"] else x.transpose(1, 2) for x in (q, k))
        return {"query": q, "new_key": k, **options}


class _Functions(TorchFunctionMode):
    """Takes the place of functions of Torch in a step."""

    def __init__(self, groups: dict[int, list[_Layer]], waiting: dict[int, Tensor]) -> None:
        super().__init__()
        self._groups = groups
        self._waiting = waiting
        self._products: dict[int, _Product] = {}  # by id of the output: those that wait
        self._rotations: dict[int, tuple[Tensor, _Rotation]] = {}  # by id of an output or a view of it, which is kept
        self._input: Optional[Tensor] = None  # of the last group
        self._ready: dict[int, tuple[Optional[Tensor], Tensor]] = {}  # by id of the weight: its bias, and its product

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return self._linear(*args, **kwargs)
        if function in _METADATA:
            return function(*args, **kwargs)
        if self._products:
            result = self._fuse(function, args, kwargs)
            if result is not None:
                return result
        if function is Tensor.transpose and id(args[0]) in self._rotations:
            view = function(*args, **kwargs)
            self._rotations[id(view)] = view, self._rotations[id(args[0])][1]
            return view
        if self._products or self._rotations:
            for tensor in _tensors_of((args, kwargs)):
                self._finish(tensor)
        if _is_rotation(function, args, kwargs):
            # As the op's own results.
            outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:2])
            rotation = _Rotation(outs, function, args)
            self._rotations |= {id(out): (out, rotation) for out in outs}
            return outs
        return function(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for product in self._products.values():
            product.compute()
        for _, rotation in self._rotations.values():
            rotation.compute()

    def rotation_of(self, query: Tensor, key: Tensor) -> Optional[dict[str, Any]]:
        """Return how attention is to rotate the query and the key of a token, or None after they are rotated."""
        rotations = [self._rotations.get(id(x), (x, None))[1] for x in (query, key)]
        options = rotations[0].for_attention() if rotations[0] is not None and rotations[0] is rotations[1] else None
        if options is None:
            self._finish(query)
            self._finish(key)
        else:
            self._drop(rotations[0])
        return options

    def _drop(self, rotation: _Rotation) -> None:
        self._rotations = {at: entry for at, entry in self._rotations.items() if entry[1] is not rotation}

    def _linear(self, input: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        self._finish(input)
        if not _can_take(input, weight, bias):
            return F.linear(input, weight, bias)
        if id(weight) in self._waiting:
            product = _Product(input.new_empty(*input.shape[:-1], weight.shape[0]), input, weight, bias)
            self._products[id(product.out)] = product
            return product.out
        if self._input is not input:
            self._ready.clear()
        ready = self._ready.pop(id(weight), None)
        if ready is not None and ready[0] is bias:
            return ready[1]
        group = self._groups.get(id(weight))
        if group is None or group[0][1] is not bias:
            return _product(input, weight, bias)
        weights, biases = zip(*group)
        products = decode.linears(input, weights, biases, constant_weights=_are_constant(*weights))
        self._input = input
        self._ready = {id(other[0]): (other[1], product) for other, product in zip(group[1:], products[1:])}
        return products[0]

    def _fuse(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Optional[Tensor]:
        """Compute a function with the products that wait for it, or return None."""
        if len(args) < 2 or kwargs:
            return None
        products = [self._products.get(id(argument)) for argument in args[:2]]
        if function in _ADDITIONS and len(args) == 2:
            for product, other in zip(products, reversed(args)):
                if product is not None and other is not product.out and _can_add(product.out, other):
                    self._finish(other)
                    del self._products[id(product.out)]
                    return _product(product.x, product.weight, product.bias, other)
        if _is_gate(function) and None not in products:
            gate, up = products
            if gate.x is up.x and gate.weight.shape == up.weight.shape and args[2] in _ACTIVATIONS:
                for product in products:
                    del self._products[id(product.out)]
                return decode.gated_linear(
                    gate.x,
                    gate.weight,
                    up.weight,
                    gate.bias,
                    up.bias,
                    activation=_ACTIVATIONS[args[2]],
                    constant_weights=_are_constant(gate.weight, up.weight),
                )
        return None

    def _finish(self, tensor: Any) -> None:
        product = self._products.pop(id(tensor), None)
        if product is not None:
            product.compute()
        if id(tensor) in self._rotations:
            _, rotation = self._rotations[id(tensor)]
            self._drop(rotation)
            rotation.compute()


class _FirstFunctions(TorchFunctionMode):
    """The functions of the first forward, which groups related operations."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self._learner = products
        self._groups: list[list[_Layer]] = []
        self._input: Optional[Tensor] = None
        self._copy: Optional[Tensor] = None
        # By id of a product that nothing has read yet: it, its weight, its input, and a copy of the input.
        self._unread: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._waiting: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA:
            return function(*args, **kwargs)
        read = [self._unread.pop(id(tensor), None) for tensor in _tensors_of((args, kwargs))]
        read = [product for product in read if product is not None]
        is_sum = function in _ADDITIONS and len(read) == 1 and len(args) == 2 and not kwargs and _can_add(*args)
        is_gate = _is_gate(function) and len(read) == 2 and read[0][2] is read[1][2] and args[2] in _ACTIVATIONS
        if (is_sum or is_gate) and all(torch.equal(input, copy) for *_, input, copy in read):
            self._waiting += [weight for _, weight, *_ in read]
        if function is not F.linear:
            return function(*args, **kwargs)
        return self._linear(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self._learner.learn(self._groups, self._waiting)

    def _linear(self, input: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        if not _can_take(input, weight, bias):
            return F.linear(input, weight, bias)
        # An input that is written between two products is another input.
        is_same = self._input is input and len(self._groups[-1]) < 3 and torch.equal(input, self._copy)
        if not is_same:
            self._groups.append([])
            self._input, self._copy = input, input.clone()
        self._groups[-1].append((weight, bias))
        product = _product(input, weight, bias)
        self._unread[id(product)] = product, weight, input, self._copy
        return product


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_of(part)
    elif isinstance(value, dict):
        yield from _tensors_of(list(value.values()))


def _can_take(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> bool:
    return (
        takes(x)
        and 0 < x.shape[:-1].numel() <= _ROWS
        and x.shape[-1] > 0
        and all(
            type(tensor) in PLAIN_TENSORS and tensor.dtype == x.dtype and tensor.device == x.device
            for tensor in ((weight,) if bias is None else (weight, bias))
        )
    )


def _are_constant(*weights: Tensor) -> bool:
    # Nothing writes the parameters of a model in a step, and a step begins with kernels of Torch, which wait for all
    # that was launched before.
    return all(type(weight) is nn.Parameter for weight in weights)


def _product(x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Optional[Tensor] = None) -> Tensor:
    return decode.linear(x, weight, bias, residual=residual, constant_weights=_are_constant(weight))


def _can_add(product: Any, other: Any) -> bool:
    return all(type(tensor) is Tensor for tensor in (product, other)) and (
        (product.shape, product.dtype, product.device) == (other.shape, other.dtype, other.device)
    )


# The activations of geglu's op, by the numbers that it takes.
_ACTIVATIONS = {0: "gelu", 1: "gelu_tanh", 2: "silu"}


def _name_of(function: Any) -> Optional[str]:
    return getattr(function, "__name__", None)


def _is_gate(function: Any) -> bool:
    return _name_of(function) == "geglu_pair.default"


# The arguments of rope3d's ops that return q and k, in their order; the last ones may be left out together.
_FORM = ("rotary_dim", "prefix", "head_dim", "half", "heads_first")
_ROTATIONS = {
    "rotate_tokens.default": ("q", "k", "cos", "sin", *_FORM, "inverse"),
    "norm_rotate.default": (
        *("q", "k", "q_weight", "k_weight", "cos", "sin"),
        *("eps", "per_token", "offset", "rounded_before_weight", *_FORM),
    ),
}


def _is_rotation(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    return _name_of(function) in _ROTATIONS and not kwargs and isinstance(args[1], Tensor)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one token. Calls from outside of a step, and unusual ones, go to transformers' own.

    Args:
        module: The attention, for transformers' own function.
        query: [batch, heads, 1, elements].
        key, value: [batch, key heads, positions, elements], as the cache gave them.
        attention_mask: [batch, 1, 1, positions], whether a position is read.
        kwargs: Other arguments of the function: `scaling`, and some that do not matter to one token.
    """
    cache: Optional[FixedCache] = getattr(_thread, "cache", None)
    new = None if cache is None else cache.take_new(key)
    if not _is_usual(query, key, value, attention_mask, kwargs):
        if new is not None:
            new.write()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    if new is None:
        return decode.attention(query, key, value, mask=attention_mask, scale=kwargs.get("scaling")), None
    functions = getattr(_thread, "functions", None)
    rotation = functions.rotation_of(query, new.key) if isinstance(functions, _Functions) else None
    output = decode.attention(
        **(rotation or {"query": query, "new_key": new.key}),
        key=key,
        value=value,
        mask=attention_mask,
        scale=kwargs.get("scaling"),
        new_value=new.value,
        position=new.slot,
        constant_cache=True,  # its content was written in earlier steps; see _are_constant
    )
    return output, None


def _is_usual(query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], kwargs: dict[str, Any]) -> bool:
    return (
        hasattr(_thread, "cache")
        and query.shape[2] == 1
        and takes(query)
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] % 8 == 0
        and query.shape[3] <= _ELEMENTS
        and (mask is None or mask.dtype == torch.bool)
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )


def _mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """Make the masks of other threads, which may run the model while this one captures a step."""
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


@contextmanager
def functions_of_step(model: nn.Module, cache: FixedCache, products: Products) -> Iterator[None]:
    """Let the modules of `model` call the functions of this module."""
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, _mask)
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "config")]
    configs = {id(module.config): module.config for module in attentions}
    changed = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == "sdpa"]
    _thread.cache = cache
    try:
        for config in changed:
            config._attn_implementation = _NAME
        with products.functions() as _thread.functions:
            yield
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"
        del _thread.cache
        _thread.functions = None
