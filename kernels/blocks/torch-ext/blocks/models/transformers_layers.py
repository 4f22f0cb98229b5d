"""Decoder layers of transformers: the sum of residual and attention and the norm of the sum in one kernel.

The layers of Olmo 2 have no norm after a sum. Their attention, MLPs and norms are replaced.
"""

from typing import Any, Optional

from torch import Tensor, nn

from ..kernel_set import takes
from ..replacements import Mismatch, replaces
from .rms_norm_forms import add_norm, form_of
from .transformers_attention import RENAMED, cache_argument


def _layer_mismatch(fused: str, *names: str) -> Mismatch:
    """Return a mismatch that asks for the norm `fused`, and for the attributes `names`."""

    def mismatch(layer: nn.Module) -> Optional[str]:
        norm = getattr(layer, fused)
        form = form_of(norm)
        if form is None:
            return f"its {fused} is not an RMSNorm that the kernels know"
        form.eps_of(norm)
        for name in ("input_layernorm", "mlp", "self_attn", *names):
            getattr(layer, name)
        return None

    return mismatch


@replaces(
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
    does="residual sum with RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_layer_mismatch("post_attention_layernorm"),
    renamed=RENAMED,
)
class PreNormLayer:
    def _after_attention(self, attended: Tensor) -> Tensor:
        return attended

    def _after_mlp(self, x: Tensor) -> Tensor:
        return x

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        past_key_values: Any = None,
        use_cache: Optional[bool] = False,
        position_embeddings: Optional[tuple[Tensor, Tensor]] = None,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states
        norm = self.post_attention_layernorm
        form = form_of(norm) if takes(x) else None
        if form is None:
            return super().forward(
                x, attention_mask, position_ids, past_key_values, use_cache, position_embeddings, **kwargs
            )
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_argument(self, past_key_values),
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        normed, x = add_norm(form, norm, self._after_attention(attended), x)
        return x + self._after_mlp(self.mlp(normed))


@replaces(
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer",
    does="residual sum with RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_layer_mismatch("post_attention_layernorm", "resid_attn_dropout", "resid_mlp_dropout"),
    renamed=RENAMED,
)
class Phi3Layer(PreNormLayer):
    def _after_attention(self, attended: Tensor) -> Tensor:
        return self.resid_attn_dropout(attended)

    def _after_mlp(self, x: Tensor) -> Tensor:
        return self.resid_mlp_dropout(x)


@replaces(
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer",
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer",
    does="residual sum with RMSNorm",
    kernels=("rmsnorm",),
    mismatch=_layer_mismatch("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    renamed=RENAMED,
)
class GemmaLayer:
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Optional[tuple[Tensor, Tensor]] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states
        norm = self.pre_feedforward_layernorm
        form = form_of(norm) if takes(x) else None
        if form is None:
            return super().forward(x, position_embeddings, attention_mask, position_ids, past_key_values, **kwargs)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache_argument(self, past_key_values),
            **kwargs,
        )
        normed, x = add_norm(form, norm, self.post_attention_layernorm(attended), x)
        return x + self.post_feedforward_layernorm(self.mlp(normed))
