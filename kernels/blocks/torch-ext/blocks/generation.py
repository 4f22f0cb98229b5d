"""`generate` of transformers with whole decoding steps as CUDA graphs.

The loop takes the place of `_sample`, the method in which `generate` decodes greedily and samples. `generate` itself
stays transformers', and so does `_sample` for the prefill, for the first token, and for calls that no graph serves.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from .calls import Refused, refuse_if
from .decoding import fuse_step
from .generation_call import IS_4, GenerateCall
from .generation_state import State
from .gpu import Gpu
from .graph_runner import Captures
from .kernel_set import is_watched
from .report import Report

_STATES = 4  # that are kept for later calls: for sizes of batches, and for threads
_SHARE = 1 / 8  # of the GPU's memory, which caches may hold between calls
_ROOM = 512  # A cache begins with memory for this many new tokens at most, and doubles.
_LONGEST = 2048  # tokens of prompts that a graph computes: for more, the GPU takes longer than the host


class Decoder(Captures):
    """Runs the decoding loop of one model."""

    def __init__(self, cls: type, report: Report, gpu: Optional[Gpu] = None) -> None:
        # `generate` makes the positions that a step gets of the first; the second is the static cache of release 4.57.
        super().__init__(cls, report, gpu, unread=("rope_deltas", "_cache") if IS_4 else ("rope_deltas",))
        self._states: set[State] = set()
        self._free: list[State] = []  # that no call uses, the last used one last
        self._refused: dict[Any, str] = {}

    def sample(
        self, model: Any, forward: Callable, own: Any, input_ids: Tensor, *, synced_gpus: bool = False, **kwargs: Any
    ) -> Any:
        """Return the result of `own`, the `_sample` of the model. `forward` is the model's own forward."""
        try:
            device = self._device_of(model)
            refuse_if(
                (synced_gpus, "several processes generate in step"),
                (is_watched(), "a function mode is active"),
                # Keys of the prefill and of a step may have different dtypes.
                (torch.is_autocast_enabled(self._gpu.type), "autocast is on"),
                (input_ids.device != device, f"the tokens are on {input_ids.device}, the model on {device}"),
            )
            # Another thread may be in a step, which changes the model's configuration.
            with self._lock, getattr(model, "_optimize_model_for_decode", nullcontext)():
                call = GenerateCall(model, own, input_ids, kwargs)
                self._check_state(model, device)
                refuse_if(((call.key, 0) in self._refused, self._refused.get((call.key, 0))))
        except Refused as refused:
            self.counts.eager[str(refused)] += 1
            return own(input_ids, synced_gpus=synced_gpus, **kwargs)
        self.counts.generated += 1
        if call.by_hand is not None:
            self.counts.by_hand[call.by_hand] += 1
        self._thread.is_active = True
        try:
            return self._generate(model, forward, own, call)
        finally:
            self._thread.is_active = False

    def is_active(self) -> bool:
        """Return whether this thread runs the model for the loop, so that its forward needs no graph of its own."""
        return getattr(self._thread, "is_active", False)

    def _forget(self) -> None:
        self._gpu.wait()
        for state in self._states:
            state.graphs.clear()  # another thread may use it
        self._states.difference_update(self._free)
        self._free.clear()
        self._refused.clear()
        self._snapshot = None
        self._count()

    def _take(self, call: GenerateCall, capacity: int) -> State:
        """Return a state for a call: one that is free, or a new one."""
        positions = None if call.position_ids is None else call.position_ids.shape[:-1]
        kind = call.input_ids.shape[0], call.windows, self._gpu.modes(), positions
        with self._lock, self._gpu.in_order(call.input_ids.device):  # the call before may have been on another stream
            state = next((state for state in reversed(self._free) if state.kind == kind), None)
            if state is None:
                state = State(kind, call, capacity, self._gpu.wait)
                self._states.add(state)
            else:
                self._free.remove(state)
                state.resize(call, capacity)
        return state

    def _give_back(self, state: State) -> None:
        device = state.token.device
        with self._lock, self._gpu.in_order(device):
            self._free.append(state)
            limit = self._gpu.memory(device) * _SHARE
            while len(self._free) > _STATES or (self._free and sum(free.bytes for free in self._free) > limit):
                self._gpu.wait()
                self._free[0].graphs.clear()
                self._states.remove(self._free.pop(0))
            self._count()

    def _count(self) -> None:
        self.counts.held = sum(len(state.graphs) for state in self._states)
        self.counts.memory = sum(state.bytes for state in self._states) + (self._pool_bytes if self.counts.held else 0)

    def _generate(self, model: Any, forward: Callable, own: Callable, call: GenerateCall) -> Any:
        tokens, ahead, kept = call.input_ids, 0, {}
        state: Any = None
        first: Any = None
        prompt = bucket_of(tokens.shape[1] + 1)  # tokens that its graph computes

        def room(length: int) -> int:
            return bucket_of(min(length, call.max_length) + ahead)

        def step(length: int) -> None:
            """Compute the token after `length` tokens."""
            if length + ahead > state.cache.capacity:
                state.resize(call, room(2 * length))
            self._run_step(state, call, model, forward)

        try:
            is_short = tokens.shape[0] * prompt <= _LONGEST and (call.key, prompt) not in self._refused
            if is_short and call.has_plain_prompt(model):
                state = self._take(call, room(tokens.shape[1] + _ROOM))
                with self._gpu.in_order(tokens.device):
                    state.begin(call, tokens)
            if state is None or not self._run_step(state, call, model, forward, prompt):
                # transformers computes the prefill and chooses the first token.
                criteria = StoppingCriteriaList([MaxLengthCriteria(tokens.shape[1] + 1)])
                first = own(tokens, call.processors, criteria, call.config, **call.kwargs)
                tokens = first if isinstance(first, Tensor) else first.sequences
                kept = {} if tokens is first else {name: getattr(first, name) for name in ("scores", "logits")}
                ahead = int(call.cache.get_seq_length()) + 1 - tokens.shape[1]  # embeddings may come in place of tokens
                state = state or self._take(call, room(tokens.shape[1] + _ROOM))
                with self._gpu.in_order(tokens.device):
                    state.begin(call, tokens)
                if not call.is_filled and type(call.cache).__name__ == "DynamicCache":
                    call.cache.layers.clear()  # its memory is free then
            with getattr(model, "_optimize_model_for_decode", nullcontext)():  # with another implementation of experts
                length = self._loop(call, state, step, call.input_ids.shape[1] + 1, kept)
            if call.streamer is not None:
                call.streamer.end()
            sequences = state.ids[:, :length].clone()
            if call.is_filled:
                state.cache.fill(call.cache, length + ahead - 1)
        finally:
            if state is not None:
                self._give_back(state)
        if first is None or isinstance(first, Tensor):
            return sequences
        return type(first)(**{**first, **kept, "sequences": sequences, call.cache_name: call.cache})

    def _loop(self, call: GenerateCall, state: State, step: Callable, length: int, kept: dict[str, Any]) -> int:
        """Launch steps until all sequences are done. Return the number of tokens, `length` at first.

        The host reads the news of a step when the next one is launched, unless it chooses the tokens itself. So when it
        reads that all are done, the GPU computes one step more: random numbers go on the same each time.
        """
        is_by_hand = call.by_hand is not None
        state.end(call, call.criteria(state.ids[:, :length], kept.get("scores")) if is_by_hand else None)
        unread = deque([(length, self._gpu.send(state.news))])  # news, and the length of the text that they end
        # A capture takes seconds: the first token does not wait for it.
        is_new = not is_by_hand and (call.key, 0) not in state.graphs and (call.key, 0) not in self._refused
        while True:
            is_last = length >= call.max_length or (call.deadline is not None and time.time() > call.deadline)
            while len(unread) > (0 if is_last or is_by_hand or is_new else 1):
                read, receive = unread.popleft()
                tokens, go_on = receive()
                if call.streamer is not None:
                    call.streamer.put(tokens.clone())
                if not go_on.any():
                    if is_new:
                        step(length)
                    return read
            if is_last:
                return length
            step(length)
            is_new = False
            if is_by_hand:
                state.choose(state.logits.clone(), call, state.ids[:, :length], kept)
                state.end(call, call.criteria(state.ids[:, : length + 1], kept.get("scores")))
            length += 1
            unread.append((length, self._gpu.send(state.news)))

    def _run_step(self, state: State, call: GenerateCall, model: nn.Module, forward: Callable, prompt: int = 0) -> bool:
        """Replay a step, which is captured if it is the first of its kind; or run it, if it cannot be captured.

        The step of a prompt computes `prompt` tokens. The second one of its kind is captured, because a capture takes
        longer than a prefill; none runs that cannot be captured. Return whether the step has run.
        """
        device, key = state.token.device, (call.key, prompt)
        compute, finish = partial(state.compute, model, call, prompt), partial(state.finish, call)
        with self._lock:
            replay, _ = state.graphs.get(key, (None, None))
            if replay is None and key not in self._refused:
                is_first = prompt > 0 and key not in state.prompts
                with self._gpu.in_order(device):
                    logits = compute(forward)  # it allocates what a capture does not allow
                    is_seen = is_first and state.changes_with_padding(logits, partial(compute, forward), call)
                try:
                    change = None if self._snapshot is None else self._snapshot.find_difference(model)
                    refuse_if((change is not None, f"its forward changes {change}"))
                    refuse_if((is_seen, "tokens of the prompt see later ones"))
                    if is_first:
                        state.prompts.add(key)
                    else:
                        self._count()  # states may have dropped graphs
                        # The recording of a prompt would take longer than many prefills.
                        replay, _ = self._capture(forward, compute, finish, device, None if prompt else [fuse_step])
                        self.counts.captured += 1
                        state.remember(key, call, replay)
                except Refused as refused:
                    self._refused[key] = str(refused)
            with self._gpu.in_order(device):
                if replay is not None:
                    state.graphs.move_to_end(key)
                    replay()
                    self.counts.replays += 1
                elif key not in self._refused:
                    finish(logits)
                elif not prompt:
                    finish(compute(forward))
                    self.counts.eager_steps[self._refused[key]] += 1
        return not prompt or key not in self._refused


def bucket_of(length: int) -> int:
    """Return a number of positions for `length` or more: at most a quarter more, and one of four in each octave."""
    unit = max(64, 1 << max(0, length.bit_length() - 3))
    return -(-length // unit) * unit
