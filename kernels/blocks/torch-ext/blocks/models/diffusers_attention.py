"""What the attention modules and blocks of diffusers have in common."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..kernel_set import adaln, rope3d
from ..replacements import is_own, original_class, path_of

Heads = tuple[Tensor, Tensor, Tensor]


def library_of(module: nn.Module) -> ModuleType:
    """Return the Python module that defines the class of `module`, to take the library's own functions from it."""
    return sys.modules[original_class(module).__module__]


def diffusers_norms() -> ModuleType:
    """Return `diffusers.models.normalization`. Its classes may be asked for only where one of their modules exists."""
    return sys.modules["diffusers.models.normalization"]


def norms_mismatch(path: str, *norms: nn.Module) -> Optional[str]:
    """Return why q and k norms cannot be computed together: another class, no weight, or different or no eps."""
    for norm in norms:
        if path_of(original_class(norm)) != path:
            return f"its q and k norms are of another class than {path}"
        if norm.weight is None or norm.weight.dim() != 1 or getattr(norm, "bias", None) is not None:
            return "its q and k norms have no weight, or a bias, or normalize over several dimensions"
        if not isinstance(norm.eps, float) or norm.eps != norms[0].eps:
            return "its q and k norms have no eps, or two"
    return None


def are_own_norms(cls: type, dtype: torch.dtype, *norms: nn.Module) -> bool:
    """Return whether kernels may read the weights of q and k norms, and the result has the dtype of their input."""
    for norm in norms:  # noqa: SIM110 - `all` over a generator costs the host twice as much
        if not (is_own(norm, cls) and norm.weight.dtype == dtype):
            return False
    return True


def is_layer_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether kernels may read the parameters of a LayerNorm, and its result has the dtype of its input."""
    return is_own(norm, nn.LayerNorm) and all(p is None or p.dtype == dtype for p in (norm.weight, norm.bias))


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Return `[batch, tokens, heads, elements]` of `[batch, tokens, heads * elements]`."""
    return x.unflatten(2, (heads, -1))


def mask_of_heads(attention: nn.Module, mask: Optional[Tensor], source: Tensor) -> Optional[Tensor]:
    """Return the mask of an attention to `source` as Torch takes it: one for all heads, if it is."""
    if mask is None:
        return None
    batch, tokens, _ = source.shape
    if mask.dim() == 3 and mask.shape[0] == batch and mask.shape[2] == tokens:
        return mask[:, None]  # broadcast to the heads
    mask = attention.prepare_attention_mask(mask, tokens, batch)
    return mask.view(batch, attention.heads, -1, mask.shape[-1])


def plain_layer_norms_mismatch(*norms: nn.Module) -> Optional[str]:
    """Return why norms are not LayerNorms over one dimension without weight and bias."""
    for norm in norms:
        if path_of(original_class(norm)) != "torch.nn.modules.normalization.LayerNorm":
            return "its norms are not LayerNorms"
        if norm.weight is not None or norm.bias is not None or len(norm.normalized_shape) != 1:
            return "its norms have a weight or bias, or normalize over several dimensions"
    return None


def ada_norms_mismatch(name: str, *norms: nn.Module) -> Optional[str]:
    """Return why norms are not of the class `name` of diffusers."""
    for norm in norms:
        if path_of(original_class(norm)) != f"diffusers.models.normalization.{name}":
            return f"its norms are not {name}"
    return None


def projections_mismatch(*projections: nn.Module) -> Optional[str]:
    """Return why projections, or activations between them, cannot be called as modules."""
    if not all(isinstance(projection, nn.Module) for projection in projections):
        return "its projections are not modules"
    return None


def are_own(cls: type, *modules: nn.Module) -> bool:
    """Return whether kernels may compute in place of all modules."""
    for module in modules:  # noqa: SIM110 - `all` over a generator costs the host twice as much
        if not is_own(module, cls):
            return False
    return True


def transformed(
    x: Tensor,
    attended: Tensor,
    norm: nn.Module,
    feed_forward: nn.Module,
    modulation: Sequence[Tensor],
) -> Tensor:
    """Return `y + gate2 * feed_forward(norm(y) * (1 + scale) + shift)` for `y = x + gate1 * attended`.

    Args:
        norm: A LayerNorm without weight and bias.
        modulation: gate1, shift, scale and gate2.
    """
    gate1, shift, scale, gate2 = modulation
    x, normed = adaln.gate_residual_ada_norm(x, attended, gate1, scale, shift, eps=norm.eps, rounding="each")
    return adaln.gate_residual(x, feed_forward(normed), gate2, rounding="each")


def within_float16(x: Tensor) -> Tensor:
    """Return `x` without infinities, in float16, as models do to their sums."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def split_tables(tables: tuple[Tensor, Tensor], tokens: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the rotary tables of the first `tokens` tokens, and those of the others."""
    cos, sin = tables
    more = cos.shape[-2] - tokens
    first = cos.narrow(-2, 0, tokens), sin.narrow(-2, 0, tokens)
    return first, (cos.narrow(-2, tokens, more), sin.narrow(-2, tokens, more))


def rotated_heads(
    projected: Sequence[Tensor],
    norms: tuple[nn.Module, nn.Module],
    tables: tuple[Tensor, Tensor],
    head_dim: int,
    rounding: str = "last",
) -> Heads:
    """Return q, k and v, of `[batch, tokens, heads, elements]`: q and k with norm and rotary embedding, v as it is."""
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in projected)
    norm_q, norm_k = norms
    options = {"eps": norm_q.eps, "rounding": rounding}
    return *rope3d.norm_rotary(query, key, norm_q.weight, norm_k.weight, *tables, **options), value


def joined_heads(first: Heads, second: Heads) -> Heads:
    """Return q, k and v of the tokens of both."""
    query, key, value = (torch.cat(pair, dim=1) for pair in zip(first, second))
    return query, key, value


def dispatch_attention(
    library: ModuleType, processor: Any, query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor]
) -> Tensor:
    """Return the attention that `processor` computes, of `[batch, tokens, heads, elements]`, with the heads joined."""
    attended = library.dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=False,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    return attended.flatten(2, 3).to(query.dtype)
