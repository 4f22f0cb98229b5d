"""Attention of transformers: q/k norms and rotary embedding in one kernel, or the rotary embedding alone.

The projections, the cache and the attention function that the model's configuration chooses are the library's.
"""

import inspect
import sys
from functools import cache
from typing import Any, Optional

from torch import Tensor, nn

from ..kernel_set import rope3d, takes
from ..replacements import Mismatch, original_class, replaces
from .rms_norm_forms import form_of
from .torch_norms import weight_for

Embeddings = tuple[Tensor, Tensor]
Attended = tuple[Tensor, Optional[Tensor]]

# From release 5.24 on, a cache is the argument `cache`. Before, `cache` was among the other arguments, with another
# meaning: the pages of continuous batching.
RENAMED = {"past_key_values": "cache"}


@cache
def _has_new_name(cls: type) -> bool:
    return "cache" in inspect.signature(cls.forward).parameters


def cache_argument(module: nn.Module, past_key_values: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument that the release of `module` gives the modules inside."""
    return {"cache" if _has_new_name(original_class(module)) else "past_key_values": past_key_values}


def _library_of(attention: nn.Module) -> Any:
    return sys.modules[original_class(attention).__module__]


def _attend(
    attention: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Optional[Tensor],
    past_key_values: Any,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Attended:
    """Return what is left of an attention's forward after the rotary embedding.

    Args:
        q, k, v: [batch, tokens, elements of all heads].
        kwargs: Other arguments of the forward, which are for the attention function.
        options: Arguments that the model adds to them.
    """
    shape = (*q.shape[:-1], -1, attention.head_dim)
    q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
    if past_key_values is not None:
        # The pages of continuous batching change these arguments.
        more = {"kwargs": kwargs} if _has_new_name(original_class(attention)) else {}
        k, v = past_key_values.update(k, v, attention.layer_idx, **more)
    library = _library_of(attention)
    attend = library.ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, library.eager_attention_forward
    )
    dropout = attention.attention_dropout if attention.training else 0.0
    options = {**kwargs, **options}
    output, weights = attend(attention, q, k, v, attention_mask, dropout=dropout, scaling=attention.scaling, **options)
    return attention.o_proj(output.reshape(*shape[:-2], -1).contiguous()), weights


# --- what forwards rely on -------------------------------------------------------------------------------------------


def _attention_mismatch(*names: str) -> Mismatch:
    """Return a mismatch that asks for what `_attend` reads, and for the attributes `names`."""

    def mismatch(attention: nn.Module) -> Optional[str]:
        library = _library_of(attention)
        _ = library.ALL_ATTENTION_FUNCTIONS.get_interface, library.eager_attention_forward
        for name in ("attention_dropout", "config", "layer_idx", "o_proj", "scaling", *names):
            getattr(attention, name)
        return "its heads have an odd number of elements" if attention.head_dim % 2 else None

    return mismatch


_SEPARATE = ("q_proj", "k_proj", "v_proj")


def _norms_mismatch(attention: nn.Module) -> Optional[str]:
    form = form_of(attention.q_norm)
    if form is None or form_of(attention.k_norm) is not form:
        return "its q and k norms are not RMSNorms that the kernels know"
    if form.eps_of(attention.q_norm) != form.eps_of(attention.k_norm):
        return "its q and k norms have different eps"
    return _attention_mismatch(*_SEPARATE)(attention)


def _head_norms_mismatch(attention: nn.Module) -> Optional[str]:
    if attention.q_norm.weight.shape[0] != attention.head_dim or attention.k_norm.weight.shape[0] != attention.head_dim:
        return "its q and k norms are not over the elements of a head"
    return _attention_mismatch("sliding_window")(attention) or _norms_mismatch(attention)


class _Attention:
    """The forward of every attention here; a subclass says how q, k and v are computed."""

    def _projected(self, x: Tensor, embeddings: Optional[Embeddings]) -> Optional[tuple[Tensor, Tensor, Tensor]]:
        """Return q and k, rotated, and v, each [batch, tokens, elements of all heads]; None if the kernels cannot."""
        raise NotImplementedError

    def _attention_options(self) -> dict[str, Any]:
        """Return the arguments that the model gives the attention function besides those of all models."""
        return {}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Optional[Embeddings] = None,
        attention_mask: Optional[Tensor] = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Attended:
        qkv = self._projected(hidden_states, position_embeddings) if takes(hidden_states) else None
        if qkv is None:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return _attend(self, *qkv, attention_mask, past_key_values, kwargs, self._attention_options())


# --- rotary embedding alone ------------------------------------------------------------------------------------------


@replaces(
    "transformers.models.llama.modeling_llama.LlamaAttention",
    does="rotary embedding of q and k",
    kernels=("rope3d",),
    mismatch=_attention_mismatch(*_SEPARATE),
    renamed=RENAMED,
)
class LlamaAttention(_Attention):
    def _projected(self, x: Tensor, embeddings: Optional[Embeddings]) -> tuple[Tensor, Tensor, Tensor]:
        q, k = rope3d.apply_rotary(
            self.q_proj(x), self.k_proj(x), *embeddings, pairs="half", layout="bsc", head_dim=self.head_dim
        )
        return q, k, self.v_proj(x)


@replaces(
    "transformers.models.qwen2.modeling_qwen2.Qwen2Attention",
    does="rotary embedding of q and k",
    kernels=("rope3d",),
    mismatch=_attention_mismatch(*_SEPARATE, "sliding_window"),
    renamed=RENAMED,
)
class Qwen2Attention(LlamaAttention):
    def _attention_options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


@replaces(
    "transformers.models.mistral.modeling_mistral.MistralAttention",
    does="rotary embedding of q and k",
    kernels=("rope3d",),
    mismatch=_attention_mismatch(*_SEPARATE),
    renamed=RENAMED,
)
class MistralAttention(LlamaAttention):
    def _attention_options(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


@replaces(
    "transformers.models.gemma2.modeling_gemma2.Gemma2Attention",
    does="rotary embedding of q and k",
    kernels=("rope3d",),
    mismatch=_attention_mismatch(*_SEPARATE, "sliding_window", "attn_logit_softcapping"),
    renamed=RENAMED,
)
class Gemma2Attention(LlamaAttention):
    def _attention_options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "softcap": self.attn_logit_softcapping}


@replaces(
    "transformers.models.phi3.modeling_phi3.Phi3Attention",
    does="rotary embedding of q and k",
    kernels=("rope3d",),
    mismatch=_attention_mismatch("qkv_proj", "num_key_value_heads"),
    renamed=RENAMED,
)
class Phi3Attention(_Attention):
    def _attention_options(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}

    def _projected(self, x: Tensor, embeddings: Optional[Embeddings]) -> tuple[Tensor, Tensor, Tensor]:
        q_width = self.config.num_attention_heads * self.head_dim
        k_width = self.num_key_value_heads * self.head_dim
        q, k, v = self.qkv_proj(x).split((q_width, k_width, k_width), -1)
        cos, sin = embeddings
        # The tables are narrower than a head in models that rotate a part of each.
        q, k = rope3d.apply_rotary(
            q, k, cos, sin, pairs="half", layout="bsc", head_dim=self.head_dim, rotary_dim=cos.shape[-1]
        )
        return q, k, v


# --- q/k norms and rotary embedding ----------------------------------------------------------------------------------


def _normed_and_rotated(
    attention: nn.Module, x: Tensor, embeddings: Optional[Embeddings], norm: str
) -> Optional[tuple[Tensor, Tensor, Tensor]]:
    """Return what `_projected` does, with q and k normalized over each `norm`: a head, or a token."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    form = form_of(q_norm)
    if form is None or form_of(k_norm) is not form:
        return None
    q_weight, k_weight = weight_for(q_norm.weight, x), weight_for(k_norm.weight, x)
    # The library's product of rounded values and a wider weight is not rounded to the dtype of x, as the kernel's is.
    if form.rounding == "before_weight" and (q_weight.dtype != x.dtype or k_weight.dtype != x.dtype):
        return None
    q, k = rope3d.norm_rotary(
        attention.q_proj(x),
        attention.k_proj(x),
        q_weight,
        k_weight,
        *embeddings,
        eps=form.eps_of(q_norm),
        norm=norm,
        offset=form.offset,
        rounding=form.rounding,
        pairs="half",
        layout="bsc",
        head_dim=attention.head_dim,
    )
    return q, k, attention.v_proj(x)


@replaces(
    "transformers.models.gemma3.modeling_gemma3.Gemma3Attention",
    "transformers.models.qwen3.modeling_qwen3.Qwen3Attention",
    does="q/k RMSNorm with rotary embedding",
    kernels=("rope3d",),
    mismatch=_head_norms_mismatch,
    renamed=RENAMED,
)
class HeadNormAttention(_Attention):
    def _attention_options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}

    def _projected(self, x: Tensor, embeddings: Optional[Embeddings]) -> Optional[tuple[Tensor, Tensor, Tensor]]:
        return _normed_and_rotated(self, x, embeddings, "head")


@replaces(
    "transformers.models.olmo2.modeling_olmo2.Olmo2Attention",
    does="q/k RMSNorm with rotary embedding",
    kernels=("rope3d",),
    mismatch=_norms_mismatch,
    renamed=RENAMED,
)
class Olmo2Attention(_Attention):
    def _projected(self, x: Tensor, embeddings: Optional[Embeddings]) -> Optional[tuple[Tensor, Tensor, Tensor]]:
        return _normed_and_rotated(self, x, embeddings, "token")
