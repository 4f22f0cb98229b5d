"""The arguments of one call of `generate`, and whether decoding steps in CUDA graphs compute the same."""

from typing import Any, Optional

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.generation import logits_process
from transformers.generation import utils as generation_utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .calls import is_value, refuse_if

_LIBRARY = GenerationMixin.__module__
_LAYERS = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
_OF_TEXT = {"attention_mask", "position_ids", "use_cache", "tokenizer", "cache", "past_key_values"}
# The prefill has read embeddings, images and sounds.
_OF_PREFILL = {"inputs_embeds", *getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())}
# Release 4.57: the inputs of a step have its position in the cache, and caches do not tell who made them.
IS_4 = not hasattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL")
# The types of new tokens, from that of the last one, as transformers' loop has them.
_TYPES = {"token_type_ids": torch.clone, "mm_token_type_ids": torch.zeros_like}
# Processors that a graph may have. The last one may look at the same token more than once: a step gives it repetitions.
_IN_GRAPHS = {
    *("EpsilonLogitsWarper", "MinPLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
    *("InfNanRemoveLogitsProcessor", "LogitNormalization", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper"),
    "RepetitionPenaltyLogitsProcessor",
}


class GenerateCall:
    """The arguments of one call of transformers' `_sample`, and their meaning."""

    deadline: Optional[float] = None  # the time at which it ends
    eos: Optional[Tensor] = None  # the ids that end a sequence

    def __init__(self, model: Any, own: Any, input_ids: Tensor, arguments: dict[str, Any]) -> None:
        """Read the arguments of `own`, the `_sample` of the model. Raise `Refused` if that must run them."""
        self.kwargs = kwargs = dict(arguments)
        self.processors, self.criteria = kwargs.pop("logits_processor"), kwargs.pop("stopping_criteria")
        self.config = config = kwargs.pop("generation_config")
        self.input_ids, self.streamer = input_ids, kwargs.pop("streamer", None)
        self.position_ids: Optional[Tensor] = kwargs.get("position_ids")
        text_config = model.config.get_text_config(decoder=True)
        # The name differs between releases of transformers.
        self.cache_name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), "")
        self.cache = kwargs.get(self.cache_name)
        types = {name: of(kwargs[name][:, -1:]) for name, of in _TYPES.items() if kwargs.get(name) is not None}
        given = {name: kwargs[name] for name in sorted(kwargs.keys() - _OF_TEXT - _OF_PREFILL - types.keys())}
        # Arguments of the forward that do not change.
        self.options = types | {name: value for name, value in given.items() if value is not None}
        self.max_length = self.criteria.max_length or 0
        mask, asked = kwargs.get("attention_mask"), config.cache_implementation
        implementation, is_static = text_config._attn_implementation, getattr(model, "_can_compile_fullgraph", False)
        methods = [own.__func__, type(model)._update_model_kwargs_for_generation]
        methods += [type(model).prepare_inputs_for_generation] if IS_4 else []
        outputs = ("output_attentions", "output_hidden_states", "is_assistant")
        refuse_if(
            *((method.__module__ != _LIBRARY, f"its class has its own {method.__name__}") for method in methods),
            (model.config.is_encoder_decoder, "it is an encoder with a decoder"),
            (not is_static, "transformers does not run its class with a static cache"),
            (implementation not in ("sdpa", "eager"), f"its attention is {implementation}"),
            ("forward" in vars(model), "its forward was replaced by other code"),
            (model._forward_hooks or model._forward_pre_hooks, "it has hooks"),
            (not kwargs.get("use_cache") or self.cache is None, "it has no cache"),
            *((not is_value(value), f"the argument {name}") for name, value in given.items()),
            *((getattr(config, name, None), f"{name} is set") for name in outputs),
            (not self.max_length, "it has no maximal length"),
            (self.max_length < input_ids.shape[1] + 2, "it is about one token"),
            (asked not in (None, "static"), f"the caller asked for a cache: {asked}"),
            (type(self.cache) not in (DynamicCache, StaticCache), f"its cache is a {type(self.cache).__name__}"),
            (mask is not None and mask.dim() != 2, "its attention mask is not one of tokens"),
            (IS_4 and self.position_ids is not None, "transformers 4 repeats the last of its position_ids"),
        )
        if IS_4 and mask is not None:
            self.position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        # Whether the caller gets the cache.
        self.is_filled = bool(config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", IS_4))
        self.windows = self._windows(text_config)
        keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        self.by_hand: Optional[str] = "the caller gets scores or logits" if keeps else None
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
        options = tuple((name, _comparable(value)) for name, value in self.options.items())
        self.key = options, None if self.by_hand else chosen  # equal for calls that one graph can serve

    def has_plain_prompt(self, model: Any) -> bool:
        """Return whether a graph may compute the prompt, and more tokens after it: tokens at the first positions."""
        others = [self.config.prefill_chunk_size, *(self.kwargs.get(name) for name in _OF_PREFILL)]
        is_other = self.is_filled or self.by_hand or any(other is not None for other in others)
        # transformers decodes with another implementation of experts.
        has_experts = not is_other and "grouped_mm" in model.get_experts_implementation().values()
        if is_other or has_experts or self.options.keys() != {"logits_to_keep"} or int(self.cache.get_seq_length()):
            return False
        mask, positions = self.kwargs.get("attention_mask"), self.position_ids
        order = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (mask is None or bool(mask.all())) and (positions is None or bool((positions == order).all()))

    def _windows(self, config: Any) -> tuple[Optional[int], ...]:
        """Return the sliding window of each layer. Raise `Refused` if a layer keeps something else, or has no room."""
        cache, tokens = self.cache, self.input_ids.shape[1]
        embeddings, mask = self.kwargs.get("inputs_embeds"), self.kwargs.get("attention_mask")
        # A static layer does not know its window if it has less room, and a dynamic cache may have no layers yet.
        layers = DynamicCache(config=config).layers
        windows = tuple(int(layer.sliding_window) if layer.is_sliding else None for layer in layers)
        kinds = [layer.is_sliding for layer in cache.layers] or [False] * len(layers)
        types = set(getattr(config, "layer_types", None) or ())
        self.takes_masks_by_type = len(types) > 1  # one for each type of layers, by name
        cached = int(cache.get_seq_length())
        keeps_all = any(getattr(layer, "record_past", False) for layer in cache.layers)
        is_like_new = kinds == [layer.is_sliding for layer in layers]
        is_whole = embeddings is None and cached < tokens and (mask is None or mask.shape[1] == tokens)
        refuse_if(
            (cache.offloading, "its cache is offloaded"),
            *((type(layer) not in _LAYERS, f"its cache has a {type(layer).__name__}") for layer in cache.layers),
            (keeps_all, "its cache keeps tokens outside of a sliding window"),
            (not layers or not is_like_new, "its cache has other layers than a new one of its model"),
            (len({*windows} - {None}) > 1, "its layers have different sliding windows"),
            (cached and not is_whole, "the cache holds tokens that the call does not have"),
            (types - {"full_attention", "sliding_attention"}, f"its attention has other masks: {', '.join(types)}"),
            (not self.takes_masks_by_type and len(set(kinds)) > 1, "its layers have masks that it does not tell apart"),
        )
        return windows


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
