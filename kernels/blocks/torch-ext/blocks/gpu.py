"""The interface to CUDA graphs: captures, the order of streams, and the settings that kernels depend on."""

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional

import torch
from torch import nn

from .calls import Refused

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_capturing = threading.Lock()  # captures share the state of the random number generator
_broken: list[torch.cuda.CUDAGraph] = []  # Torch could not end their captures, and its allocator refers to them


class Gpu:
    """The CUDA operations of one model's runner."""

    type = "cuda"

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None
        self._last: Optional[tuple[torch.cuda.Stream, torch.cuda.Event]] = None
        self._order = threading.RLock()

    def find_obstacle(self, device: torch.device) -> Optional[str]:
        """Return why a call on `device` can neither be captured nor replayed now, or None."""
        if torch.cuda.is_current_stream_capturing():
            return "the caller captures a graph"
        return "a capture could not be ended" if _broken else None

    def modes(self) -> tuple:
        """Return the global settings that kernels are chosen by."""
        autocast, matmul, cudnn = torch.is_autocast_enabled("cuda"), torch.backends.cuda.matmul, torch.backends.cudnn
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            *(part.fp32_precision for part in (matmul, cudnn.conv, cudnn.rnn)),  # type: ignore[attr-defined]
            *(getattr(matmul, f"allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")),
            *(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION),
            *(getattr(cudnn, name) for name in ("enabled", "deterministic", "benchmark")),
        )

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any, device: torch.device) -> tuple[Callable[[], None], Any, int]:
        """Return a function that repeats `run`, its result and its memory; or raise `Refused`, with CUDA as before."""
        if self._stream is None:
            # Not Torch's stream for captures: graphs of one stream share cuBLAS's workspace, and must not run together.
            self._stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        cause: Optional[BaseException] = None
        # The weights that autocast caches would be freed when its context ends.
        autocast = torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
        # Other threads may allocate and wait meanwhile.
        capture = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        with _capturing:
            try:
                # `graph` leaves its stream current if it fails to end the capture: the outer context resets it.
                with torch.cuda.stream(torch.cuda.current_stream(device)), capture, autocast:
                    before = torch.cuda.memory_reserved(device)
                    try:
                        output = run()
                    except BaseException as error:
                        cause = error
                        raise
                    used = torch.cuda.memory_reserved(device) - before
            except BaseException as error:
                if error is not cause and not _end_capture(graph, self._stream):
                    _broken.append(graph)
                if not isinstance(error, Exception):
                    raise
                name, text = type(cause or error).__name__, str(cause or error).strip().partition("\n")[0]
                cause = None  # its traceback has this frame, and with it the memory
                raise Refused(f"it cannot be captured: {name}: {text}") from None
        return graph.replay, output, max(used, 0)

    @contextmanager
    def in_order(self, device: torch.device) -> Iterator[None]:
        """Let the current stream wait for the last use of the graphs' memory, and record this one, even if it fails."""
        with self._order:  # another thread's use between a wait and its record would be lost to the next wait
            stream = torch.cuda.current_stream(device)
            if self._last is not None and self._last[0] != stream:
                stream.wait_event(self._last[1])
            try:
                yield
            finally:
                event = self._last[1] if self._last is not None else torch.cuda.Event()
                event.record(stream)
                self._last = stream, event

    def wait(self) -> None:
        """Wait until the GPU has finished all replays."""
        if self._last is not None:
            self._last[1].synchronize()

    def send(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a tensor to the host. Return a function that waits for the copy, and for nothing after it."""
        copy = tensor.to("cpu", non_blocking=True)  # Torch takes pinned memory for it
        event = torch.cuda.Event(blocking=True)
        event.record()

        def receive() -> torch.Tensor:
            event.synchronize()
            return copy

        return receive

    def memory(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory

    def release(self) -> None:
        """Give the memory of dropped graphs back."""
        if self._last is not None:
            torch.cuda.empty_cache()


def on_device_of(model: nn.Module) -> AbstractContextManager:
    """Return a context in which the device of a model is the current one."""
    weight = next(model.parameters(), None)
    return torch.cuda.device(weight.device) if weight is not None and weight.is_cuda else nullcontext()


def _end_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """Let Torch finish a capture that CUDA has ended with an error. Return whether that worked.

    `capture_end` raises CUDA's error before it ends the capture for the allocator and the random number generator. It
    gets as far as that if it ends another, empty capture of the same stream.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        handle = ctypes.c_void_p(stream.cuda_stream)
        if driver.cuStreamBeginCapture_v2(handle, 2) != 0:  # 2: relaxed
            return False
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            try:
                graph.capture_end()
            finally:
                if torch.cuda.is_current_stream_capturing():
                    driver.cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))
        graph.reset()
        return True
    except (OSError, AttributeError, RuntimeError):
        return False
