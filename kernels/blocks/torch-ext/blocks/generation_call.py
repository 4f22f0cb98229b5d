"""The arguments of one call of `generate`, and whether decoding steps in CUDA graphs compute the same.

This module imports transformers: import it only for a model of transformers.
"""

from typing import Any, Optional

from torch import Tensor
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .calls import is_value, refuse_if

_LAYERS = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
_INPUTS = {"attention_mask", "position_ids", "inputs_embeds", "use_cache", "tokenizer"}
# Processors that a graph may have. The last one may look at the same token more than once: a step gives it repetitions.
_IN_GRAPHS = {
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}


class GenerateCall:
    """The arguments of one call of transformers' `_sample`, and their meaning.

    Attributes:
        input_ids, processors, criteria, config, streamer, kwargs: The arguments.
        options: Arguments of the forward that do not change.
        max_length: The number of tokens at which it ends.
        deadline: The time at which it ends, or None.
        cache_name: The name of the cache's argument in this release of transformers.
        cache: The cache of transformers.
        is_filled: Whether the caller gets it.
        windows: The sliding window of each layer, or None.
        takes_masks_by_type: Whether the model takes a mask for each type of its layers, by name.
        eos: The ids that end a sequence, or None.
        pad: The token that continues finished sequences, or None.
        by_hand: Why tokens are chosen outside of the graph, or None.
        key: Equal for calls that one graph can serve.
    """

    def __init__(
        self,
        model: Any,
        own: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Understand the arguments of `own`, the `_sample` of the model.

        Raises:
            Refused: If transformers' own loop must run it.
        """
        self.input_ids, self.streamer, self.kwargs = input_ids, streamer, kwargs
        self.processors, self.criteria = logits_processor, stopping_criteria
        self.config = config = generation_config
        self.cache_name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), "")
        self.cache = kwargs.get(self.cache_name)
        self.options = {
            name: value
            for name, value in kwargs.items()
            # transformers itself passes empty dictionaries, of encoders that have nothing to encode.
            if value is not None and not (type(value) is dict and not value) and name not in {*_INPUTS, self.cache_name}
        }
        library, most = GenerationMixin.__module__, self.criteria.max_length
        mask = kwargs.get("attention_mask")
        implementation = model.config.get_text_config(decoder=True)._attn_implementation
        outputs = ("output_attentions", "output_hidden_states", "is_assistant")
        refuse_if(
            (own.__func__.__module__ != library, "its class has a decoding loop of its own"),
            (
                type(model)._update_model_kwargs_for_generation.__module__ != library,
                "its class prepares the arguments of each step",
            ),
            (model.config.is_encoder_decoder, "it is an encoder with a decoder"),
            (
                not getattr(model, "_can_compile_fullgraph", False),
                "transformers does not run its class with a static cache",
            ),
            (implementation not in ("sdpa", "eager"), f"its attention is {implementation}"),
            ("forward" in vars(model), "its forward was replaced by other code"),
            (model._forward_hooks or model._forward_pre_hooks, "it has hooks"),
            (not kwargs.get("use_cache") or self.cache is None, "it has no cache"),
            *((not is_value(value), f"the argument {name}") for name, value in self.options.items()),
            *((getattr(config, name, None), f"{name} is set") for name in outputs),
            (most is None, "it has no maximal length"),
            (most is not None and most < input_ids.shape[1] + 2, "it is about one token"),
            (
                config.cache_implementation not in (None, "static"),
                f"the caller asked for a cache: {config.cache_implementation}",
            ),
            (type(self.cache) not in (DynamicCache, StaticCache), f"its cache is a {type(self.cache).__name__}"),
            (mask is not None and mask.dim() != 2, "its attention mask is not one of tokens"),
        )
        self.max_length: int = self.criteria.max_length
        self.is_filled = bool(config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False))
        self.windows = self._windows(model.config.get_text_config(decoder=True))
        self.deadline: Optional[float] = None
        self.eos: Optional[Tensor] = None
        keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        self.by_hand = "the caller gets scores or logits" if keeps else None
        for criterion in self.criteria:
            if type(criterion) is MaxTimeCriteria:
                self.deadline = criterion.initial_timestamp + criterion.max_time
            elif type(criterion) is EosTokenCriteria and self.eos is None:
                self.eos = criterion.eos_token_id.to(input_ids.device)
            elif type(criterion) is not MaxLengthCriteria:
                self.by_hand = f"the stopping criterion {type(criterion).__name__} cannot be part of a graph"
        pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad: Optional[Tensor] = config._pad_token_tensor if pads else None
        keys = [_key_of(processor) for processor in self.processors]
        if None in keys:
            name = type(self.processors[keys.index(None)]).__name__
            self.by_hand = f"the logits processor {name} cannot be part of a graph"
        chosen = *keys, _comparable(self.eos), _comparable(self.pad), bool(config.do_sample)
        self.key = tuple(self.options.items()), None if self.by_hand else chosen

    def _windows(self, config: Any) -> tuple[Optional[int], ...]:
        """Return the sliding window of each layer, of which the cache and a configuration know some.

        Raises:
            Refused: If a layer keeps something else, or has no room.
        """
        cache, tokens = self.cache, self.input_ids.shape[1]
        embeddings, mask = self.kwargs.get("inputs_embeds"), self.kwargs.get("attention_mask")
        # A static layer does not know its window if it has less room, and a dynamic cache may have no layers yet.
        layers = DynamicCache(config=config).layers
        windows = tuple(int(layer.sliding_window) if layer.is_sliding else None for layer in layers)
        kinds = [layer.is_sliding for layer in cache.layers] or [False] * len(layers)
        types = set(getattr(config, "layer_types", None) or ())
        self.takes_masks_by_type = len(types) > 1
        cached = int(cache.get_seq_length())
        is_whole = embeddings is None and cached < tokens and (mask is None or mask.shape[1] == tokens)
        refuse_if(
            (cache.offloading, "its cache is offloaded"),
            *((type(layer) not in _LAYERS, f"its cache has a {type(layer).__name__}") for layer in cache.layers),
            (
                any(getattr(layer, "record_past", False) for layer in cache.layers),
                "its cache keeps tokens outside of a sliding window",
            ),
            (
                not layers or kinds != [layer.is_sliding for layer in layers],
                "its cache has other layers than a new one of its model",
            ),
            (len({*windows} - {None}) > 1, "its layers have different sliding windows"),
            (cached and not is_whole, "the cache holds tokens that the call does not have"),
            (types - {"full_attention", "sliding_attention"}, f"its attention has other masks: {', '.join(types)}"),
            (not self.takes_masks_by_type and len(set(kinds)) > 1, "its layers have masks that it does not tell apart"),
        )
        return windows


# --- logits processors ------------------------------------------------------------------------------------------------


def _key_of(processor: Any) -> Optional[tuple]:
    """Return a value that is equal for processors that do the same; None if a graph cannot have the processor."""
    name, values = type(processor).__name__, vars(processor)
    if getattr(logits_process, name, None) is not type(processor) or name not in _IN_GRAPHS:
        return None
    # A repetition penalty may be for packed sequences, or leave out the padding of each sequence.
    if any(isinstance(values.get(name), Tensor) for name in ("prompt_ignore_length", "logits_indices")):
        return None
    key = tuple((name, _comparable(value)) for name, value in values.items())
    return (name, *key) if all(is_value(value) or type(value) is tuple for _, value in key) else None


def _comparable(value: Any) -> Any:
    """Return a value that can be compared, in place of a tensor."""
    return (value.dtype, *value.flatten().tolist()) if isinstance(value, Tensor) else value
