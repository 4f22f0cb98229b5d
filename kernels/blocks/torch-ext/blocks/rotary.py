"""Rotary embeddings, recognized by their results, alone and together with the norms of q and k."""

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import probes
from .deferred import Deferred, Normed, now, pending
from .kernel_set import PLAIN_TENSORS, fits, is_capturing, is_forward_mode, is_like, is_transformed, rope3d
from .norms import has_rows, weight_for
from .projections import joined_tokens

# Sizes of the probes, all different: sequences, tokens, heads of q and of k, elements of a head.
_B, _S, _H, _G, _D = 2, 5, 3, 4, 16


@dataclass(frozen=True, eq=False)
class RotaryForm:
    """How a call rotates, for x and tables of some numbers of dimensions.

    Attributes:
        layout: "bhsd" or "bshd"; "shd" for x without sequences, "bsd" for x whose heads are one, "bSHd" for tables that
            differ from head to head.
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
    """A way to call a rotary function: its arguments, and its formula by the dimensions of x and of a table.

    Attributes:
        function: The called function.
        watched: The functions that it calls.
        tensors: The number of tensors to rotate: the first arguments.
        cos: The argument that has the cosines, or both tables, or the complex rotations: its position and name.
        sin: The argument that has the sines, or None where `cos` has both.
        swapped: Whether the sines come first.
        forms: By the numbers of dimensions of x and of a table, and whether that is complex.
    """

    function: Any
    watched: probes.Watched
    tensors: int
    cos: tuple[int, str]
    sin: Optional[tuple[int, str]]
    forms: dict[tuple[int, int, bool], list[RotaryForm]]


_calls: dict[Hashable, Optional[RotaryCall]] = {}
_repeating: dict[Hashable, bool] = {}


def recognized_rotary(function: Any, given: int, options: dict[str, Any]) -> Optional[RotaryCall]:
    """Return a function's formula, or None if it does not rotate as a kernel does.

    Args:
        function: A function of a model's module, or its replacement by `kernels`.
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
                _calls[key] = _recognize(function, watched, given, options, source)
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


def _recognize(
    function: Any, watched: probes.Watched, given: int, options: dict[str, Any], source: torch.Generator
) -> Optional[RotaryCall]:
    called = type(function).forward if isinstance(function, nn.Module) else function
    try:
        names = [name for name in inspect.signature(called).parameters if name != "self"]
    except ValueError:
        return None
    cos, sin = (next((i for i, n in enumerate(names) if n.rpartition("_")[2] == name), None) for name in ("cos", "sin"))
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
    for layout, rank in product(("bhsd", "bshd", "shd", "bsd", "bSHd"), (2, 3, 4)):
        form = _form(call, layout, rank, options, source)
        if form is not None:
            dims = (len(layout), rank, form.complex)
            call.forms.setdefault(dims, []).append(form)
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

        def agrees(width: int, *dtypes: torch.dtype, form: RotaryForm) -> bool:
            return _agrees(call, form, rank, width, dtypes, options, source)

        form = RotaryForm(layout, pairs, repeats, is_complex)
        if agrees(_D, wide, wide, form=form):
            casts = agrees(_D, lower, wide, form=form)
            if casts or agrees(_D, lower, lower, form=form):
                return replace(form, casts=casts, partial=agrees(_D // 2, wide, wide, form=form))
    return None


def _agrees(
    call: RotaryCall, form: RotaryForm, rank: int, width: int, dtypes: tuple, options: Any, source: torch.Generator
) -> bool:
    dtype, table_dtype = dtypes
    sizes = {"b": _B, "s": _S, "d": _D, "S": _S, "H": _H}
    xs = [
        probes.random([(sizes | {"h": heads})[name] for name in form.layout], source, dtype)
        for heads in (_H, _G)[: call.tensors]
    ]
    batch = () if form.layout == "shd" else (_B,)
    shape = {2: (_S,), 3: (*batch, _S), 4: (*batch, 1, _S) if form.layout == "bhsd" else (*batch, _S, 1)}[rank]
    if form.layout == "bSHd":
        shape = (_S, _H)
    if len(shape) != rank - 1 or (form.layout == "bSHd" and call.tensors > 1):
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
    if table.dim() == 4 or form.layout in ("bsd", "bSHd"):
        return table
    return table.unsqueeze(-3 if form.layout == "bhsd" else -2)


# --- computation ------------------------------------------------------------------------------------------------------


class _Viewed(Deferred):
    """A norm of which the heads are made after it: `getattr(x, name)(*args)`, of `x` likewise."""

    source: Any = None

    def __init__(self, x: Any, name: str, args: Any) -> None:
        self.x, self.name, self.args = x, name, args

    def computed(self) -> Tensor:
        return getattr(self.x.now(), self.name)(*self.args)


class _Joined(Deferred):
    """Normalized parts, joined along a dimension."""

    def __init__(self, parts: list[Any], dim: int) -> None:
        self.parts, self.dim = parts, dim

    def computed(self) -> Tensor:
        return joined_tokens(*map(now, self.parts), self.dim)


def viewed(x: Any, name: str, *args: Any) -> Any:
    """Return `getattr(x, name)(*args)`, of a view or a part of `x`."""
    cls = type(x)
    if cls in PLAIN_TENSORS:
        return getattr(x, name)(*args)
    if (cls is _Viewed or (cls is Normed and x.__dict__.get("state", "") is None)) and x.value is None:
        return _Viewed(x, name, args)
    return getattr(now(x), name)(*args)


def joined(parts: list[Any], dim: int) -> Any:
    """Return `torch.cat(parts, dim)`."""
    first, second = parts
    if type(first) in PLAIN_TENSORS and type(second) in PLAIN_TENSORS:
        return joined_tokens(first, second, dim)
    if pending(first, Normed, _Viewed) and pending(second, Normed, _Viewed):
        return _Joined(parts, dim)
    return joined_tokens(now(first), now(second), dim)


def rotated(call: RotaryCall, function: Callable, xs: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*xs, *args, **kwargs)`, or for a function of one tensor its results for each of `xs`."""
    parts = [x.parts if type(x) is _Joined and x.value is None else (x,) for x in xs]
    results = _rotated(call, function, parts, args, kwargs)
    if results is None:
        xs = tuple(map(now, xs))
        results = function(*xs, *args, **kwargs) if call.tensors == 2 else [function(x, *args, **kwargs) for x in xs]
    return results[0] if len(xs) == 1 else tuple(results)


def rotated_part(
    call: RotaryCall, function: Callable, xs: tuple[Any, ...], parts: Any, dim: int, *args: Any, **kwargs: Any
) -> Any:
    """Rotate the first of two parts of each of `xs`, and join it with the second part."""
    first, second = (part[dim] for part in parts)
    end = second.start
    is_cut = type(end) is int and end < 0 and first == slice(None, end) and second == slice(end, None)
    results = _rotated(call, function, [(x,) for x in xs], args, kwargs, -end, dim) if is_cut else None
    if results is None:
        wholes = map(now, xs)
        results = [torch.cat((function(x[parts[0]], *args, **kwargs), x[parts[1]]), dim) for x in wholes]
    return results[0] if len(xs) == 1 else tuple(results)


def rotate_part(call: RotaryCall, function: Callable, x: Any, part: Any, *args: Any, **kwargs: Any) -> None:
    """Compute `x[part] = function(x[part], *args, **kwargs)`."""
    given = x[part]
    prepared = _prepared(call, function, [(given,)], args, kwargs, 0)
    if prepared is None:
        x[part] = function(given, *args, **kwargs)
    elif torch.is_grad_enabled() and x.requires_grad:  # autograd takes no kernel that changes a view
        x[part] = _rotated(call, function, [(given,)], args, kwargs)[0]
    else:
        _, ((heads,),), (tables,), options = prepared
        rope3d.apply_rotary(heads, None, *tables, inplace=True, **options)


def _rotated(
    call: RotaryCall, function: Callable, parts: list, args: Any, kwargs: Any, more: int = 0, dim: int = -1
) -> Optional[list[Tensor]]:
    """Return the rotations of one or two tensors, each given by its parts along the tokens, or None.

    Args:
        more: The number of tokens at the end that are not rotated.
        dim: The dimension of the tokens, if there are such.
    """
    groups = list(zip(*parts))
    prepared = _prepared(call, function, groups, args, kwargs, more) if len(parts[0]) == len(parts[-1]) else None
    if prepared is None or (more and prepared[0].layout.index("s") != dim):
        return None
    form, heads, tables, options = prepared
    outs = [_rotated_group(form, *each, options) for each in zip(groups, heads, tables)]
    results = outs[0] if len(outs) == 1 else [torch.cat(each, 1) for each in zip(*outs)]
    return [_BACK[form.layout](x, _source(y).shape) for x, y in zip(results, groups[0])]


def _rotated_group(
    form: RotaryForm, group: Any, heads: list[Tensor], tables: Any, options: dict[str, Any]
) -> list[Tensor]:
    kind, *of_weights = _kind_of(group[0], heads[0])
    if len(group) == 2:
        other, *of_other = _kind_of(group[1], heads[1])
        kind, of_weights = kind if kind == other else None, of_weights + of_other
    if kind is None:
        heads = [
            part if type(x) in PLAIN_TENSORS else _TOKENS_FIRST[form.layout](now(x)) for x, part in zip(group, heads)
        ]
        return list(rope3d.apply_rotary(*_two(heads), *tables, **options)[: len(heads)])
    eps, offset, rounding, norm = kind
    out = rope3d.norm_rotary(
        *(*_two(heads), *_two(of_weights), *tables), eps=eps, offset=offset, rounding=rounding, norm=norm, **options
    )
    return list(out[: len(heads)])


def _two(tensors: list) -> list:
    return tensors if len(tensors) == 2 else [tensors[0], None]


def _source(x: Any) -> Tensor:
    """Return a tensor, or of a pending norm its input, in the shape of its result."""
    if type(x) is _Viewed and x.value is None:
        if x.source is None:
            x.source = getattr(_source(x.x), x.name)(*x.args)
        return x.source
    return now(x.x) if type(x) is Normed and x.value is None else now(x)


def _kind_of(x: Any, heads: Tensor) -> tuple[Any, Optional[Tensor]]:
    """Return a pending norm's eps, offset, rounding and kind, as the kernel takes them, and its weight.

    Of anything else, return None for both.
    """
    while type(x) is _Viewed and x.value is None:
        x = x.x
    if type(x) is not Normed or x.value is not None:
        return None, None
    rows, form = now(x.x), x.form
    if x.state is not None or form.centered or form.bias or not has_rows(rows, form.width):
        return None, None
    weight, _ = form.parameters(x.norm)
    rounding = form.rounding(rows.dtype, None if weight is None else weight.dtype)
    # The product of rounded values and a wider weight is not rounded to the dtype of x, as the kernel's is.
    if rounding is None or (weight is not None and rounding == "before_weight" and weight.dtype != rows.dtype):
        return None, None
    batch, count, number, size = heads.shape
    if rows.shape[-1] == size:
        kind = "head"
    elif rows.shape == (batch, count, number * size) and weight is not None:
        kind = "token"
    else:
        return None, None
    return (form.eps_of(x.norm), form.offset, rounding, kind), weight_for(weight, rows)


def _prepared(
    call: RotaryCall, function: Callable, groups: list, args: Any, kwargs: Any, more: int
) -> Optional[tuple[RotaryForm, list[list[Tensor]], Any, dict[str, Any]]]:
    """Return the form, and for each group the tensors and the tables for the kernels, and their options."""
    if function is not call.function:
        return None
    groups = [[_source(x) for x in group] for group in groups]
    tables = [_argument(where, args, kwargs, call.tensors) for where in (call.cos, call.sin) if where is not None]
    if call.sin is None and isinstance(tables[0], (tuple, list)):
        tables = list(tables[0])
    x, table, other = groups[0][0], tables[0], tables[-1]
    if not fits(x) or type(table) not in PLAIN_TENSORS or not is_like(other, table):
        return None
    form = _form_for(call, x, table, len(groups) > 1)
    if form is None or len(tables) != (1 if form.complex else 2) or not call.watched.are_unchanged():
        return None
    shape, size = table.shape, x.shape[-1]
    dtype = torch.float32 if form.complex else table.dtype
    width = 2 * shape[-1] if form.repeats == "once" else shape[-1]
    if (
        width > size
        or (width < size and not form.partial)
        or width % 2
        or (dtype != x.dtype and not form.casts)
        or table.device != x.device
    ):
        return None
    heads, counts, ndim = [], [], x.dim()
    for group in groups:
        heads.append([])
        for y in group:
            if type(y) not in PLAIN_TENSORS or y.dim() != ndim or y.dtype != x.dtype:
                return None
            heads[-1].append(_TOKENS_FIRST[form.layout](y))
            batch, count, _, elements = heads[-1][-1].shape
            if elements != size or batch != heads[0][0].shape[0] or count != heads[-1][0].shape[1]:
                return None
        counts.append(count)
    if form.repeats in ("half", "interleaved") and not _repeats(call, form, tables):
        return None
    prepared = _tables_for(form, tables, counts, more)
    if prepared is None or (prepared[0][0].dim() == 3 and prepared[0][0].shape[0] not in (1, batch)):
        return None
    options = {"pairs": form.pairs, "rotary_dim": width} if width != size else {"pairs": form.pairs}
    return form, heads, prepared, options


def _form_for(call: RotaryCall, x: Tensor, table: Tensor, is_part: bool) -> Optional[RotaryForm]:
    for form in call.forms.get((x.dim(), table.dim(), table.is_complex()), ()):
        if _has_tokens(table, form, x, is_part):
            return form
    return None


def _tables_for(form: RotaryForm, tables: list[Tensor], counts: list[int], more: int) -> Any:
    """Return the tables of the kernels for parts of some numbers of tokens, the last `more` of them not rotated."""
    cos, sin = (_for_kernels(table, form) for table in (_parts_of(tables[0]) if form.complex else tables))
    if cos.shape[-2] + more != sum(counts):
        return None
    if more:
        shape = (*cos.shape[:-2], more, cos.shape[-1])
        cos, sin = torch.cat((cos, cos.new_ones(shape)), -2), torch.cat((sin, sin.new_zeros(shape)), -2)
    begins = accumulate(counts, initial=0)
    return [tuple(table.narrow(-2, begin, count) for table in (cos, sin)) for begin, count in zip(begins, counts)]


def _parts_of(rotations: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of complex rotations. Makes them once for each tensor."""
    parts = getattr(rotations, "_blocks_parts", None)
    if parts is None:
        with torch.inference_mode(False), torch.no_grad():
            parts = rotations.real.contiguous(), rotations.imag.contiguous()
        if not (is_capturing() or is_forward_mode() or is_transformed()):  # else they are not for later calls
            rotations._blocks_parts = parts
    return parts


def _has_tokens(table: Tensor, form: RotaryForm, x: Tensor, is_part: bool) -> bool:
    """Return whether a table has tokens and heads where a form has those of x."""
    dims = table.dim()
    if dims == 3 and x.dim() == 4:
        return (form.layout == "bSHd") == (table.shape[:2] == x.shape[1:3] and not is_part)
    if dims < 4:
        return True
    count = x.shape[form.layout.index("s")]
    return table.shape[form.layout.index("h")] == 1 and (is_part or table.shape[form.layout.index("s")] == count)


def _argument(where: tuple[int, str], args: Any, kwargs: Any, before: int) -> Any:
    index, name = where
    return args[index - before] if index - before < len(args) else kwargs.get(name)


def _repeats(call: RotaryCall, form: RotaryForm, tables: list[Tensor]) -> bool:
    """Return whether tables have the value of a pair at both of its elements, as all that the function ever got.

    It reads the first tables of each width, which waits for the GPU.
    """
    key = call.function, tables[0].shape[-1]
    known = _repeating.get(key)
    if known is not None:
        return known
    if is_capturing():
        return False
    same = True
    for table in tables:
        first, second = table.chunk(2, -1) if form.repeats == "half" else (table[..., ::2], table[..., 1::2])
        same = same and bool(torch.equal(first, second))
    _repeating[key] = same
    return same


# By layout: x as `[batch, tokens, heads, n]`, and its inverse.
_TOKENS_FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "bhsd": lambda x: x.transpose(1, 2),
    "bshd": lambda x: x,
    "shd": lambda x: x[None],
    "bsd": lambda x: x.unsqueeze(2),
    "bSHd": lambda x: x.flatten(1, 2).unsqueeze(2),  # each head is a token of its own
}
_BACK: dict[str, Callable[[Tensor, torch.Size], Tensor]] = {
    "bhsd": lambda y, shape: y.transpose(1, 2),
    "bshd": lambda y, shape: y,
    "shd": lambda y, shape: y[0],
    "bsd": lambda y, shape: y.squeeze(2),
    "bSHd": lambda y, shape: y.view(shape),
}


def _for_kernels(table: Tensor, form: RotaryForm) -> Tensor:
    if form.layout == "bSHd":
        table = table.flatten(0, 1)
    if table.dim() == 4:
        table = table.squeeze(form.layout.index("h"))
    if table.dtype == torch.float64:
        table = table.float()
    return table[..., : table.shape[-1] // 2] if form.repeats == "first" else table
