"""`generate` of transformers with whole decoding steps as CUDA graphs.

transformers' loop runs the model's Python for every token, and waits for the GPU twice. Here a step is one launch: it
computes the logits, processes them, chooses a token, writes it, and finds out which sequences are done. The host only
launches steps, one ahead of the GPU, and reads the results of the step before the last one.

The loop takes the place of `_sample`, the method in which `generate` decodes greedily and samples. `generate` itself,
with its checks and its preparation, stays transformers', and so does `_sample` for the prefill, for the first token,
and for whatever a graph cannot do.
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .calls import Refused, is_value
from .findings import Findings, Tally
from .fusions import fuse
from .generation_processors import Formless, eos_of, form_of
from .generation_step import Copies, Plan, State, StepGraph
from .gpu import Gpu
from .recording import Recording
from .snapshots import Snapshot

# Threads that generate at the same time, and sizes of batches that take turns.
_STATES = 4
# The part of the GPU's memory that caches may hold between calls.
_SHARE = 1 / 8
# A cache begins with room for this many new tokens at most, and doubles.
_ROOM = 512
_LIBRARY = "transformers.generation.utils"
_OPTIONS = {"attention_mask", "position_ids", "inputs_embeds", "use_cache", "tokenizer"}


@dataclass
class GenerationCounts:
    """Counts of `generate` so far.

    Attributes:
        calls: Calls with this package's loop.
        steps: Decoding steps that replayed a graph.
        captured: Graphs captured.
        eager_steps: Steps that ran without a graph, by reason.
        by_hand: Calls whose tokens were chosen outside of the graph, step by step, by reason.
        eager: Calls with transformers' own loop, by reason.
        memory: Bytes of GPU memory that caches, buffers and graphs hold.
        note: Why no call can have graphs as the model is now, or None.
    """

    calls: int = 0
    steps: int = 0
    captured: int = 0
    eager_steps: Counter[str] = field(default_factory=Counter)
    by_hand: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    note: Optional[str] = None

    def __str__(self) -> str:
        text = (
            f"{self.calls} calls with a static cache, {self.captured} steps captured, {self.steps} replays, "
            f"{self.memory / 2**20:.0f} MiB held"
        )
        if self.note is not None:
            text += f"; none can be captured now: {self.note}"
        lines = [text]
        lines += [f"{number:6} steps eager: {reason}" for reason, number in self.eager_steps.items()]
        lines += [f"{number:6} calls step by step: {reason}" for reason, number in self.by_hand.items()]
        lines += [f"{number:6} calls as before: {reason}" for reason, number in self.eager.items()]
        return "\n".join(lines)


def generates(module: nn.Module) -> bool:
    """Return whether a module has the `generate` of transformers."""
    return _LIBRARY in sys.modules and isinstance(module, sys.modules[_LIBRARY].GenerationMixin)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of `_sample`, and their meaning.

    Attributes:
        max_length: The number of tokens at which it ends.
        deadline: The time at which it ends, or None.
        windows: The sliding window of each layer, or None.
        given: The cache of transformers.
        is_filled: Whether the caller gets it.
    """

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    kwargs: dict[str, Any]
    plan: Plan
    max_length: int
    deadline: Optional[float]
    windows: tuple
    given: Any
    is_filled: bool

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt. Embeddings may come in place of ids."""
        embeddings = self.kwargs.get("inputs_embeds")
        return self.input_ids.shape[1] if embeddings is None else embeddings.shape[1]

    @property
    def most_cached(self) -> int:
        """The number of tokens that the cache has to hold at most."""
        return self.max_length + self.prompt_length - self.input_ids.shape[1]


class Decoder:
    """Runs the decoding loop of one model."""

    def __init__(self, cls: type, findings: Findings, gpu: Optional[Gpu] = None) -> None:
        self.counts = GenerationCounts()
        self._tally = Tally(cls, findings)
        self._gpu = gpu or Gpu()
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._states: list[State] = []
        self._pool: Any = None
        self._pool_bytes = 0
        self._snapshot: Optional[Snapshot] = None
        self._refused: dict[Any, str] = {}

    def on_device_of(self, model: nn.Module) -> AbstractContextManager:
        """Return a context in which the device of a model is the current one."""
        return self._gpu.on_device_of(model)

    def is_active(self) -> bool:
        """Return whether this thread runs the model for the loop, so that its forward needs no graph of its own."""
        return getattr(self._thread, "is_active", False)

    def sample(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        own: Callable[..., Any],
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Return the result of `own`, the `_sample` of the model. `forward` is the model's own forward."""
        try:
            if synced_gpus:
                raise Refused("several processes generate in step")
            device = self._device_of(model)
            if input_ids.device != device:
                raise Refused(f"the tokens are on {input_ids.device}, the model on {device}")
            arguments = input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            # Another thread may be in a step, which changes the model's configuration.
            with self._lock, _for_decoding(model):
                call = _prepare(model, own, *arguments)
                self._check_model(model, device)
                key = call.plan.key, self._gpu.modes()
                if key in self._refused:
                    raise Refused(self._refused[key])
                state = self._take(call, device)
        except Refused as refused:
            self.counts.eager[str(refused)] += 1
            return own(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        self.counts.calls += 1
        if call.plan.by_hand is not None:
            self.counts.by_hand[call.plan.by_hand] += 1
        try:
            with self._active():
                return _Generation(self, model, forward, own, call, state, key).run()
        finally:
            self._give_back(state)

    def remove(self) -> None:
        """Free all memory. Calls that come later begin anew."""
        with self._lock:
            self._forget()
            self._gpu.release()

    # --- the model ---------------------------------------------------------------------------------------------------

    def _device_of(self, model: nn.Module) -> torch.device:
        weight = next(model.parameters(), None)
        if weight is None or weight.device.type != self._gpu.type:
            self.counts.note = "the model is not on a CUDA device"
            raise Refused(self.counts.note)
        obstacle = self._gpu.find_obstacle(weight.device)
        if obstacle is not None:
            raise Refused(obstacle)
        if torch.is_autocast_enabled(self._gpu.type):
            raise Refused("autocast is on")  # keys of the prefill and of a step may have different dtypes
        return weight.device

    def _check_model(self, model: nn.Module, device: torch.device) -> None:
        """Drop everything if the model has changed."""
        if self._snapshot is not None and not self._snapshot.is_current(model):
            self._forget()
        if self._snapshot is None:
            self._snapshot = Snapshot(model, device)
        self.counts.note = self._snapshot.obstacle
        if self._snapshot.obstacle is not None:
            raise Refused(self._snapshot.obstacle)

    def _forget(self) -> None:
        for state in self._states:
            state.drop_graphs()  # another thread may use it
        self._states.clear()
        self._refused.clear()
        self._snapshot = None
        self._count()

    # --- memory ------------------------------------------------------------------------------------------------------

    def _take(self, call: _Call, device: torch.device) -> State:
        """Return a state for a call: one that is free, or a new one."""
        from .generation_cache import FixedCache

        kind = call.input_ids.shape[0], call.windows, self._gpu.modes()
        capacity = bucket_of(min(call.most_cached, call.prompt_length + _ROOM))
        free = [state for state in self._states if not state.is_busy]
        fitting = [state for state in free if state.kind == kind]
        if fitting:
            state = fitting[-1]
            state.is_busy = True
            # The call before may have been on another stream.
            with self._gpu.in_order(device):
                state.cache.reset()
                if state.cache.capacity < capacity:
                    state.grow(capacity)
        else:
            if len(self._states) >= _STATES:
                if not free:
                    raise Refused(f"{_STATES} other threads generate")
                self._drop(free[0])
            state = State(FixedCache(call.windows, capacity, device), kind, device, self._gpu.wait)
        # The last one was used last.
        self._states = [other for other in self._states if other is not state] + [state]
        return state

    def _give_back(self, state: State) -> None:
        with self._lock:
            with self._gpu.in_order(state.token.device):
                state.is_busy = False
            limit = self._gpu.memory(state.token.device) * _SHARE
            while sum(held.bytes for held in self._states) > limit and any(not held.is_busy for held in self._states):
                self._drop(next(held for held in self._states if not held.is_busy))
            self._count()

    def _drop(self, state: State) -> None:
        self._gpu.wait()
        self._states.remove(state)

    def _count(self) -> None:
        has_graphs = any(state.graphs for state in self._states)
        self.counts.memory = sum(state.bytes for state in self._states) + (self._pool_bytes if has_graphs else 0)

    # --- steps -------------------------------------------------------------------------------------------------------

    def run_step(self, state: State, key: Any, bucket: int, plan: Plan, model: nn.Module, forward: Callable) -> None:
        """Replay a step, which is captured if it is the first of its kind; or run it, if it cannot be captured."""
        from .decoding import attention_of_step

        def compute(forward: Callable[..., Any]) -> Tensor:
            return state.compute(model, forward, attention_of_step(model, state.cache), plan, bucket)

        with self._lock:
            graph = state.graphs.get((bucket, key))
            if graph is None and key not in self._refused:
                with self._gpu.in_order(state.token.device):
                    compute(forward)  # for nothing: it allocates what a capture does not allow
                if self._snapshot is not None and not self._snapshot.is_current(model):
                    self._refused[key] = f"its forward changes {self._snapshot.find_difference(model)}"
                else:
                    graph = self._capture(state, (bucket, key), plan, model, forward, compute)
            with self._gpu.in_order(state.token.device):
                if graph is not None:
                    state.graphs.move_to_end((bucket, key))
                    graph.replay()
                    self.counts.steps += 1
                else:
                    state.finish(compute(forward), plan, Copies(plan, state.token.device))
                    self.counts.eager_steps[self._refused[key]] += 1

    def _capture(
        self, state: State, key: Any, plan: Plan, model: nn.Module, forward: Callable, compute: Callable
    ) -> Optional[StepGraph]:
        device = state.token.device
        copies = Copies(plan, device)
        if not any(other.graphs for other in self._states):
            self._pool, self._pool_bytes = self._gpu.new_pool(), 0
        try:
            run = self._recorded(model, forward, compute, device)
            replay, _, used = self._gpu.capture(lambda: state.finish(compute(run), plan, copies), self._pool, device)
        except Refused as refused:
            self._refused[key[1]] = str(refused)
            return None
        self._pool_bytes += used
        self.counts.captured += 1
        graph = StepGraph(replay, copies)
        state.remember(key, graph)
        return graph

    def _recorded(self, model: nn.Module, forward: Callable, compute: Callable, device: torch.device) -> Callable:
        """Return a forward's recorded calls with the kernels among them, or where it has others, the forward."""
        from .decoding import fuse_step

        recording = Recording(type(model))

        def record(*args: Any, **kwargs: Any) -> Any:
            return recording.record(forward, args, kwargs)

        self._gpu.dry_run(lambda: compute(record), device)
        if recording.obstacle is not None:
            self._tally.miss(f"no kernels in its decoding steps: {recording.obstacle}")
            return forward
        misses = fuse(recording.module)
        self._tally.add(recording.module.graph, misses)
        fuse_step(recording.module)
        return recording.run

    def fill_copies(self, state: State, plan: Plan, key: Any) -> None:
        """Give the graphs of a plan the tensors of a call's own processors."""
        with self._lock:
            for (_, own), graph in state.graphs.items():
                if own == key:
                    graph.copies.fill(plan)

    def send(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._gpu.send(tensor)

    @contextmanager
    def _active(self) -> Iterator[None]:
        self._thread.is_active = True
        try:
            yield
        finally:
            self._thread.is_active = False


def bucket_of(length: int) -> int:
    """Return a number of positions for `length` or more: at most a quarter more, and one of four in each octave."""
    unit = max(64, 1 << max(0, length.bit_length() - 3))
    return -(-length // unit) * unit


class _Generation:
    """One call: prefill, first token, and the loop."""

    def __init__(
        self,
        decoder: Decoder,
        model: nn.Module,
        forward: Callable[..., Any],
        own: Callable[..., Any],
        call: _Call,
        state: State,
        key: Any,
    ) -> None:
        self._decoder = decoder
        self._model = model
        self._forward = forward
        self._own = own
        self._call = call
        self._state = state
        self._key = key
        self._scores: tuple = ()
        self._logits: tuple = ()

    def run(self) -> Any:
        call, state, plan = self._call, self._state, self._call.plan
        first = self._first_token()
        if plan.keeps_scores:
            self._scores = first.scores
        if plan.keeps_logits:
            self._logits = first.logits
        tokens = first if isinstance(first, Tensor) else first.sequences
        cached = state.cache.layers[0].length
        state.begin(tokens, call.kwargs.get("attention_mask"), call.kwargs.get("position_ids"), plan.eos)
        self._decoder.fill_copies(state, plan, self._key)
        with _for_decoding(self._model):
            loop = self._loop_by_hand if plan.by_hand is not None else self._loop
            length = loop(tokens.shape[1], cached)
        if call.streamer is not None:
            call.streamer.end()
        sequences = state.tokens.ids[:, :length].clone()
        if call.is_filled:
            state.cache.end(cached + length - tokens.shape[1])
            state.cache.fill(call.given)
        if isinstance(first, Tensor):
            return sequences
        kept = {"sequences": sequences, plan.cache_name: call.given}
        count = length - call.input_ids.shape[1]
        if plan.keeps_scores:
            kept["scores"] = self._scores[:count]
        if plan.keeps_logits:
            kept["logits"] = self._logits[:count]
        return type(first)(**{**first, **kept})

    def _first_token(self) -> Any:
        """Let transformers compute the prefill and choose the first token."""
        library = sys.modules["transformers.generation.stopping_criteria"]
        call = self._call
        self._state.cache.take(call.given)
        criteria = library.StoppingCriteriaList([library.MaxLengthCriteria(call.input_ids.shape[1] + 1)])
        return self._own(
            call.input_ids,
            logits_processor=call.processors,
            stopping_criteria=criteria,
            generation_config=call.config,
            **{**call.kwargs, call.plan.cache_name: self._state.cache},
        )

    def _loop(self, length: int, cached: int) -> int:
        """Launch steps until all sequences are done. Return the number of tokens.

        A step is launched when the news of the step before the last one are here. The GPU is never without work, and
        computes one step for nothing at the end: always one, so that the same random numbers are left each time.
        """
        call, state = self._call, self._state
        waiting = deque([(length, self._decoder.send(state.news))])
        is_done = False
        while True:
            is_last = length >= call.max_length or (call.deadline is not None and time.time() > call.deadline)
            while waiting and not is_done and (is_last or len(waiting) > 1):
                length_then, receive = waiting.popleft()
                *tokens, goes_on = receive().tolist()
                if call.streamer is not None:
                    call.streamer.put(torch.tensor(tokens))
                if not goes_on:
                    is_done, length = True, length_then
            if is_done or is_last:
                return length
            self._step(cached)
            length, cached = length + 1, cached + 1
            self._keep_outputs()
            waiting.append((length, self._decoder.send(state.news)))

    def _loop_by_hand(self, length: int, cached: int) -> int:
        """Choose tokens as transformers does, after the logits of each step."""
        call, state, plan = self._call, self._state, self._call.plan
        unfinished = torch.ones(state.kind[0], dtype=torch.long, device=call.input_ids.device)
        ids = state.tokens.ids[:, :length]
        while True:
            unfinished = unfinished & ~call.criteria(ids, self._scores if plan.keeps_scores else None)
            if call.streamer is not None:
                call.streamer.put(ids[:, -1].cpu())
            if not unfinished.max():
                return length
            self._step(cached)
            self._keep_outputs()
            processed = call.processors(ids, state.logits.clone())
            if plan.keeps_scores:
                self._scores += (processed,)
            best = torch.multinomial(processed.softmax(-1), 1)[:, 0] if plan.samples else processed.argmax(-1)
            chosen = best if plan.pad is None else best * unfinished + plan.pad * (1 - unfinished)
            state.put(chosen, length)
            length, cached = length + 1, cached + 1
            ids = state.tokens.ids[:, :length]

    def _step(self, position: int) -> None:
        """Compute the token after the one at `position`."""
        state, plan = self._state, self._call.plan
        if position >= state.cache.capacity:
            state.grow(bucket_of(min(2 * position, self._call.most_cached)))
        bucket = min(bucket_of(position + 1), state.cache.capacity)
        self._decoder.run_step(state, self._key, bucket, plan, self._model, self._forward)

    def _keep_outputs(self) -> None:
        state, plan = self._state, self._call.plan
        if plan.keeps_logits:
            self._logits += (state.logits.clone(),)
        if plan.keeps_scores and plan.by_hand is None:
            self._scores += (state.scores.clone(),)


# --- the arguments of a call -----------------------------------------------------------------------------------------


def _prepare(
    model: nn.Module,
    own: Callable[..., Any],
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
    kwargs: dict[str, Any],
) -> _Call:
    """Return the meaning of a call's arguments.

    Raises:
        Refused: If transformers' own loop must run it.
    """
    _check_methods(model, own)
    cache_name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
    if not kwargs.get("use_cache") or cache_name is None:
        raise Refused("it has no cache")
    options = {
        name: value
        for name, value in kwargs.items()
        # transformers itself passes empty dictionaries, of encoders that have nothing to encode.
        if value is not None and not (type(value) is dict and not value) and name not in {*_OPTIONS, cache_name}
    }
    for name, value in options.items():
        if not is_value(value):
            raise Refused(f"the argument {name}")
    for name in ("output_attentions", "output_hidden_states", "is_assistant"):
        if getattr(config, name, None):
            raise Refused(f"{name} is set")
    max_length = criteria.max_length
    if max_length is None:
        raise Refused("it has no maximal length")
    if max_length < input_ids.shape[1] + 2:
        raise Refused("it is about one token")
    given = kwargs[cache_name]
    windows = _windows_of(model, given, config, input_ids, max_length, kwargs)
    eos, deadline, by_hand = None, None, None
    for criterion in criteria:
        is_theirs = type(criterion).__module__ == "transformers.generation.stopping_criteria"
        kind = type(criterion).__name__ if is_theirs else None
        if kind == "MaxTimeCriteria":
            deadline = criterion.initial_timestamp + criterion.max_time
        elif kind == "EosTokenCriteria" and eos is None:
            eos = eos_of(criterion)
        elif kind != "MaxLengthCriteria":
            by_hand = f"the stopping criterion {type(criterion).__name__} cannot be part of a graph"
    forms = []
    try:
        forms = [form_of(processor) for processor in processors]
    except Formless as formless:
        by_hand = str(formless)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    returns_dict = config.return_dict_in_generate
    plan = Plan(
        cache_name=cache_name,
        adds_masks=model.config.get_text_config(decoder=True)._attn_implementation == "eager",
        by_type=_takes_masks_by_type(model, cache_name, windows, input_ids.shape[0]),
        options=options,
        forms=tuple(forms),
        eos=eos,
        pad=config._pad_token_tensor if pads else None,
        samples=bool(config.do_sample),
        keeps_scores=bool(returns_dict and config.output_scores),
        keeps_logits=bool(returns_dict and config.output_logits),
        by_hand=by_hand,
    )
    return _Call(
        input_ids=input_ids,
        processors=processors,
        criteria=criteria,
        config=config,
        streamer=streamer,
        kwargs=kwargs,
        plan=plan,
        max_length=max_length,
        deadline=deadline,
        windows=windows,
        given=given,
        is_filled=bool(returns_dict or getattr(given, "_is_user_defined", False)),
    )


def _check_methods(model: Any, own: Any) -> None:
    """Refuse models that decode in their own way."""
    if own.__func__.__module__ != _LIBRARY:
        raise Refused("its class has a decoding loop of its own")
    if type(model)._update_model_kwargs_for_generation.__module__ != _LIBRARY:
        raise Refused("its class prepares the arguments of each step")
    if model.config.is_encoder_decoder:
        raise Refused("it is an encoder with a decoder")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise Refused("transformers does not run its class with a static cache")
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise Refused(f"its attention is {implementation}")
    if "forward" in vars(model):
        raise Refused("its forward was replaced by other code")
    if model._forward_hooks or model._forward_pre_hooks:
        raise Refused("it has hooks")


def _windows_of(
    model: nn.Module, cache: Any, config: Any, input_ids: Tensor, max_length: int, kwargs: dict[str, Any]
) -> tuple:
    """Return the windows of the layers of a cache that `generate` has made or the caller has given."""
    from .generation_cache import windows_of

    if config.cache_implementation not in (None, "static"):
        raise Refused(f"the caller asked for a cache: {config.cache_implementation}")
    text, embeddings = model.config.get_text_config(decoder=True), kwargs.get("inputs_embeds")
    ahead = 0 if embeddings is None else embeddings.shape[1] - input_ids.shape[1]
    windows = windows_of(cache, text, input_ids.shape[0], max_length + ahead - 1)
    cached, mask = int(cache.get_seq_length()), kwargs.get("attention_mask")
    is_whole = cached < input_ids.shape[1] and (mask is None or mask.shape[1] == input_ids.shape[1])
    if cached and (embeddings is not None or not is_whole):
        raise Refused("the cache holds tokens that the call does not have")
    return windows


def _takes_masks_by_type(model: Any, cache_name: str, windows: tuple, batch: int) -> bool:
    """Return whether the forward of a model takes a mask for each type of its layers."""
    from transformers import DynamicCache

    library = sys.modules["transformers.masking_utils"]
    make = getattr(model, "create_masks_for_generate", library.create_masks_for_generate)
    like = torch.empty((batch, 1, 0), dtype=model.dtype, device=model.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    masks = make(config=model.config, inputs_embeds=like, attention_mask=None, position_ids=None, **{cache_name: cache})
    if isinstance(masks, dict):
        if not masks.keys() <= {"full_attention", "sliding_attention"}:
            raise Refused(f"its attention has other masks: {', '.join(masks)}")
        return True
    if len({window is None for window in windows}) > 1:
        raise Refused("its layers have masks that it does not tell apart")
    return False


def _for_decoding(model: nn.Module) -> Any:
    """Return the context in which transformers runs decoding steps, with another implementation of experts."""
    optimize = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if optimize is None else optimize()
