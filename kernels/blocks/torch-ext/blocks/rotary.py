"""Rotary embeddings, recognised by what they compute, alone and together with the norms of q and k."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import probes
from .kernel_set import is_capturing, rope3d, takes
from .norms import form_of, weight_for
from .rotary_tables import parts

_PLAIN = (Tensor, nn.Parameter)
# Sizes of the probes, all different: sequences, tokens, heads of q and of k, elements of a head.
_B, _S, _H, _G, _D = 2, 5, 3, 4, 16


@dataclass(frozen=True)
class RotaryForm:
    """How a call rotates, for x and tables of some numbers of dimensions.

    Attributes:
        layout: "bhsd" or "bshd"; "shd" for x without sequences.
        pairs: "half" or "interleaved".
        repeats: How the tables have the value of a pair: "half" or "interleaved" at both elements, "once", or "first":
            like "half", and the second half is not read.
        complex: Whether there is one table, of complex rotations.
        casts: Whether the result has the dtype of x, also where the tables are wider.
        partial: Whether it may rotate the first elements of a head only.
    """

    layout: str
    pairs: str
    repeats: str
    complex: bool
    casts: bool = False
    partial: bool = False


@dataclass(frozen=True)
class RotaryCall:
    """A way to call a rotary function: where it gets what, and what it computes by the dimensions of x and of a table.

    Attributes:
        function: What is called.
        watched: The functions that it calls.
        tensors: The number of tensors to rotate: the first arguments.
        cos: The argument that has the cosines, or both tables, or the complex rotations: its position and name.
        sin: The argument that has the sines, or None where `cos` has both.
        swapped: Whether the sines come first.
        forms: By the numbers of dimensions of x and of a table.
    """

    function: Any
    watched: probes.Watched
    tensors: int
    cos: tuple[int, str]
    sin: Optional[tuple[int, str]]
    forms: dict[tuple[int, int, bool], RotaryForm]


_calls: dict[Hashable, Optional[RotaryCall]] = {}
_repeating: dict[Hashable, bool] = {}


def recognised_rotary(function: Any, given: int, options: dict[str, Any]) -> Optional[RotaryCall]:
    """Return what a function computes, or None if it does not rotate as a kernel does.

    Args:
        function: A function of a model's module, or what `kernels` made of one.
        given: The number of arguments that calls give it.
        options: Other arguments of the calls that are constants.
    """
    if not is_candidate(function):
        return None
    watched = probes.watched_function(function)
    key = function, watched.key(), given, tuple(sorted(options.items()))
    try:
        if key not in _calls:
            with probes.probing() as source:
                _calls[key] = _recognise(function, watched, given, options, source)
        return _calls[key]
    except TypeError:  # an option that cannot be hashed
        return None


def is_candidate(function: Any) -> bool:
    """Return whether a function gets tables, by the names of its parameters: others are not called to see."""
    called = type(function).forward if isinstance(function, nn.Module) else function
    if not inspect.isfunction(called):
        return False
    return gets_tables([name for name in inspect.signature(called).parameters if name != "self"])


def gets_tables(names: list[str]) -> bool:
    return {"cos", "sin"} <= set(names[:4]) or any("freq" in name or "rot" in name for name in names[1:3])


def _recognise(
    function: Any, watched: probes.Watched, given: int, options: dict[str, Any], source: torch.Generator
) -> Optional[RotaryCall]:
    called = type(function).forward if isinstance(function, nn.Module) else function
    try:
        names = [name for name in inspect.signature(called).parameters if name != "self"]
    except ValueError:
        return None
    cos, sin = (names.index(name) if name in names else None for name in ("cos", "sin"))
    if cos is not None and sin is not None:
        tensors, tables = min(cos, sin), {cos, sin}
    else:
        tensors = 2 if given > 2 else 1
        cos, sin, tables = tensors, None, {tensors}
    if (
        tensors not in (1, 2)
        or given != tensors + len(tables)
        or max(tables) >= len(names)
        or max(tables) != tensors + len(tables) - 1
    ):
        return None
    where = (cos, names[cos]), None if sin is None else (sin, names[sin])
    call = RotaryCall(function, watched, tensors, *where, {})
    for layout, rank in product(("bhsd", "bshd", "shd"), (2, 3, 4)):
        form = _form(call, layout, rank, options, source)
        if form is not None:
            dims = (3 if layout == "shd" else 4, rank, form.complex)
            call.forms.setdefault(dims, form)
    return call if call.forms else None


def _form(
    call: RotaryCall, layout: str, rank: int, options: dict[str, Any], source: torch.Generator
) -> Optional[RotaryForm]:
    wide, lower = torch.float32, torch.bfloat16
    for pairs, repeats, is_complex in (
        ("half", "half", False),
        ("interleaved", "interleaved", False),
        ("interleaved", "first", False),
        ("half", "once", False),
        ("interleaved", "once", False),
        ("interleaved", "once", True),
    ):

        def agrees(width: int, dtype: torch.dtype, of_tables: torch.dtype, *, form: RotaryForm) -> bool:
            return _agrees(call, form, rank, width, dtype, of_tables, options, source)

        form = RotaryForm(layout, pairs, repeats, is_complex)
        if agrees(_D, wide, wide, form=form):
            casts = agrees(_D, lower, wide, form=form)
            if casts or agrees(_D, lower, lower, form=form):
                return replace(form, casts=casts, partial=agrees(_D // 2, wide, wide, form=form))
    return None


def _agrees(
    call: RotaryCall,
    form: RotaryForm,
    rank: int,
    width: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    options: dict[str, Any],
    source: torch.Generator,
) -> bool:
    shapes = {"bhsd": lambda h: (_B, h, _S, _D), "bshd": lambda h: (_B, _S, h, _D), "shd": lambda h: (_S, h, _D)}
    xs = [probes.random(shapes[form.layout](heads), source, dtype) for heads in (_H, _G)[: call.tensors]]
    batch = () if form.layout == "shd" else (_B,)
    shape = {2: (_S,), 3: (*batch, _S), 4: (*batch, 1, _S) if form.layout == "bhsd" else (*batch, _S, 1)}[rank]
    if len(shape) != rank - 1:
        return False
    once = [probes.random((*shape, width // 2), source, table_dtype) for _ in range(2)]
    if form.complex:
        tables = [torch.complex(*(table.float() for table in once))]
    elif form.repeats == "once":
        tables = once
    elif form.repeats == "interleaved":
        tables = [table.repeat_interleave(2, -1) for table in once]
    else:
        tables = [torch.cat((table, table if form.repeats == "half" else table + 1), -1) for table in once]
    arguments: dict[int, Any] = dict(enumerate(xs))
    if call.sin is None:
        arguments[call.cos[0]] = tables[0] if form.complex else tuple(tables)
    else:
        arguments[call.cos[0]], arguments[call.sin[0]] = tables[0], tables[-1]
        if form.complex:
            return False
    try:
        own = call.function(*(arguments[index] for index in sorted(arguments)), **options)
    except Exception:
        return False
    own = (own,) if isinstance(own, Tensor) else own
    if not isinstance(own, (tuple, list)) or len(own) != len(xs):
        return False
    return all(_is_rotated(x, y, once, form) for x, y in zip(xs, own))


def _is_rotated(x: Tensor, own: Any, once: list[Tensor], form: RotaryForm) -> bool:
    """Return whether `own` is the rotation of `x`, in float32 to the order of sums, in bfloat16 to its roundings."""
    if not isinstance(own, Tensor) or own.shape != x.shape or own.dtype != x.dtype:
        return False
    cos, sin = (_aligned(table.double(), form) for table in once)
    rotary, x = 2 * cos.shape[-1], x.double()
    rotated, rest = x[..., :rotary], x[..., rotary:]
    if form.pairs == "half":
        first, second = rotated.chunk(2, -1)
        y = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        y = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    expected = torch.cat((y, rest), -1)
    allowed = 1e-5 if own.dtype == torch.float32 else 0.05
    return bool(((own.double() - expected).abs() <= allowed * (1 + expected.abs())).all())


def _aligned(table: Tensor, form: RotaryForm) -> Tensor:
    """Return a table with a dimension of size 1 for the heads."""
    if table.dim() == 4:
        return table
    return table.unsqueeze(-3 if form.layout == "bhsd" else -2)


# --- what is computed -------------------------------------------------------------------------------------------------


def rotated(call: RotaryCall, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`."""
    found = _prepared(call, function, args, kwargs)
    if found is None:
        return function(*args, **kwargs)
    form, (q, k), tables, width = found
    return _finished(call, form, rope3d.apply_rotary(q, k, *tables, pairs=form.pairs, **_layout(form, q, width)))


def norm_rotated(call: RotaryCall, norms: tuple[Any, ...], whole: bool, function: Callable, *args: Any, **kwargs: Any):
    """Return what `rotated` does of normalized q and k.

    Args:
        norms: The norms of the tensors.
        whole: Whether the norms are over all heads of a token, before these were split and transposed.
    """
    found = _prepared(call, function, args, kwargs)
    forms = [form_of(norm) for norm in norms]
    form, norm = forms[0], norms[0]
    if found is None or any(other is None or other.centered or other.bias for other in forms):
        return _separately(call, norms, whole, function, args, kwargs)
    rotary, (q, k), tables, width = found
    weights = [weight_for(other.parameters(n)[0], q) for other, n in zip(forms, norms)]
    for other, own, weight in zip(forms, norms, weights):
        size = q.shape[-1] * (q.shape[2] if whole and own is norm else k.shape[2] if whole else 1)
        rounding = other.rounding(q.dtype, None if weight is None else own._parameters[other.weight].dtype)
        if (
            rounding != form.rounding(q.dtype, None if weight is None else norm._parameters[form.weight].dtype)
            or rounding is None
            or other.eps_of(own) != form.eps_of(norm)
            or other.offset != form.offset
            # The product of rounded values and a wider weight is not rounded to the dtype of x, as the kernel's is.
            or (weight is not None and rounding == "before_weight" and weight.dtype != q.dtype)
            or (whole if weight is None else weight.shape[0] != size)
        ):
            return _separately(call, norms, whole, function, args, kwargs)
    out = rope3d.norm_rotary(
        q,
        k,
        weights[0],
        weights[-1] if k is not None else None,
        *tables,
        eps=form.eps_of(norm),
        norm="token" if whole else "head",
        offset=form.offset,
        rounding=rounding,
        pairs=rotary.pairs,
        **_layout(rotary, q, width),
    )
    return _finished(call, rotary, out)


def _separately(
    call: RotaryCall, norms: tuple[Any, ...], whole: bool, function: Callable, args: Any, kwargs: Any
) -> Any:
    """Return `function` of the normalized tensors, each by itself."""
    xs = [x if form_of(norm) is None else _normed_heads(norm, x) if whole else norm(x) for norm, x in zip(norms, args)]
    return rotated(call, function, *xs, *args[len(xs) :], **kwargs)


def normed_later(norm: Any, x: Any) -> Any:
    """Return what `norm_rotated` gets: `x` if that may compute the norm, or else the norm, called in its place."""
    return norm(x) if form_of(norm) is None else x


def _normed_heads(norm: Any, x: Tensor) -> Tensor:
    """Return what was split into heads and transposed, normalized as before that."""
    tokens = x.transpose(1, 2)
    return norm(tokens.reshape(-1, form_of(norm).width)).view(tokens.shape).transpose(1, 2)


def _prepared(call: RotaryCall, function: Callable, args: Any, kwargs: Any) -> Any:
    """Return the form, `[batch, tokens, heads, elements]` of q and k, the kernels' tables and the rotated width."""
    if function is not call.function or len(args) < call.tensors or type(args[0]) not in _PLAIN:
        return None
    xs = args[: call.tensors]
    tables = [_argument(where, args, kwargs) for where in (call.cos, call.sin) if where is not None]
    if call.sin is None and isinstance(tables[0], (tuple, list)):
        tables = list(tables[0])
    if not (takes(xs[0]) and all(type(tensor) in _PLAIN for tensor in (*xs, *tables))):
        return None
    form = call.forms.get((xs[0].dim(), tables[0].dim(), tables[0].is_complex()))
    if form is None or len(tables) != (1 if form.complex else 2) or not call.watched.are_unchanged():
        return None
    x, last = xs[0], tables[0].shape[-1]
    dtype = torch.float32 if form.complex else tables[0].dtype
    width = 2 * last if form.repeats == "once" else last
    if (
        width > x.shape[-1]
        or (width < x.shape[-1] and not form.partial)
        or width % 2
        or (dtype != x.dtype and not form.casts)
        or any(t.device != x.device or t.shape != tables[0].shape or t.dtype != tables[0].dtype for t in tables)
        or any(other.dim() != x.dim() or other.dtype != x.dtype for other in xs)
    ):
        return None
    if form.repeats in ("half", "interleaved") and not _repeats(call, form, tables):
        return None
    heads = [_tokens_first(x, form) for x in xs]
    tables = [_for_kernels(table, form) for table in (parts(tables[0]) if form.complex else tables)]
    batch, tokens = heads[0].shape[:2]
    if any(
        table is None or table.shape[-2] != tokens or (table.dim() == 3 and table.shape[0] not in (1, batch))
        for table in tables
    ):
        return None
    if any(other.shape[:2] != (batch, tokens) for other in heads):
        return None
    return form, (heads[0], heads[1] if len(heads) > 1 else None), tables, width


def _argument(where: tuple[int, str], args: Any, kwargs: Any) -> Any:
    index, name = where
    return args[index] if index < len(args) else kwargs.get(name)


def _repeats(call: RotaryCall, form: RotaryForm, tables: list[Tensor]) -> bool:
    """Return whether tables have the value of a pair at both of its elements, as all that the function ever got.

    It reads the first tables of each width, which waits for the GPU.
    """
    key = call.function, tables[0].shape[-1], tables[0].device.type
    if key not in _repeating and not is_capturing():
        same = True
        for table in tables:
            first, second = table.chunk(2, -1) if form.repeats == "half" else (table[..., ::2], table[..., 1::2])
            same = same and bool(torch.equal(first, second))
        _repeating[key] = same
    return _repeating.get(key, False)


def _tokens_first(x: Tensor, form: RotaryForm) -> Tensor:
    if form.layout == "shd":
        return x[None]
    return x.transpose(1, 2) if form.layout == "bhsd" else x


def _for_kernels(table: Tensor, form: RotaryForm) -> Optional[Tensor]:
    if table.dim() == 4:
        heads = 1 if form.layout == "bhsd" else 2
        if table.shape[heads] != 1:
            return None
        table = table.squeeze(heads)
    if table.dtype == torch.float64:
        table = table.float()
    if form.repeats == "interleaved":
        return table
    return table[..., : table.shape[-1] // 2] if form.repeats == "first" else table


def _layout(form: RotaryForm, q: Tensor, width: int) -> dict[str, Any]:
    return {"rotary_dim": width} if width != q.shape[-1] else {}


def _finished(call: RotaryCall, form: RotaryForm, out: Any) -> Any:
    q, k = out
    xs = [q] if call.tensors == 1 else [q, k]
    if form.layout == "shd":
        xs = [x[0] for x in xs]
    elif form.layout == "bhsd":
        xs = [x.transpose(1, 2) for x in xs]
    return xs[0] if call.tensors == 1 else tuple(xs)
