"""Times public models with and without `blocks.accelerate`, and beside torch.compile, on a GPU.

    python benchmarks/models.py time --case ltx-2464 --case wan-7800 --json models.json
    python benchmarks/models.py accuracy --case ltx-2464 --json models.json
    python benchmarks/models.py together --case qwen3-128 --json together.json
    python benchmarks/models.py train --case ltx-2464 --json models.json
    python benchmarks/models.py profile --case ltx-2464 --json models.json
    python benchmarks/models.py pipeline --json models.json

It needs Torch, diffusers, transformers and the public `kernels` client, which finds the packages through LOCAL_KERNELS
or on the Hub, and not the builder. Each command adds to the JSON. The models have real configurations and random
weights, in bfloat16, with batch 1; `public_models.py` has them.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from model_reports import case_parser, describe, kernel, update
from public_models import CASES, Case, make, make_inputs, make_model
from torch import Tensor, multiprocessing, nn

_ROUNDS = 7
_ROUND_MS = 150  # the least time of the calls of one round
_MOST_CALLS = 32  # the cache of the decoding case has room for twice as many

_COMPILED = ("compile", "reduce-overhead", "compile-accelerated")
VARIANTS = ("eager", "compile", "reduce-overhead", "accelerated", "blocks", "graphs", "compile-accelerated")


def main() -> None:
    """Run one of the commands for each case, and add the results to the JSON."""
    parser = case_parser(__doc__, CASES, VARIANTS)
    parser.add_argument("command", choices=["time", "together", "accuracy", "train", "profile", "pipeline"])
    parser.add_argument("--device", default="cuda", help="[default: cuda]")
    parser.add_argument(
        "--seconds",
        type=float,
        default=900,
        help="Time only the cases that are ready by then, with and without compiling. [default: 900]",
    )
    arguments = parser.parse_args()
    names = arguments.case or list(CASES)
    variants = arguments.variant or list(VARIANTS)
    if arguments.command == "time":
        results = _time_together(names, variants, arguments)
    elif arguments.command == "pipeline":
        results = {"ltx-pipeline": _pipeline(arguments.device, arguments.layers)}
    else:
        measures = {"together": _together, "accuracy": _accuracy, "train": _train, "profile": _profile}
        measure = measures[arguments.command]
        results = {name: measure(CASES[name], variants, arguments.device, arguments.layers) for name in names}
    for name, result in results.items():
        print(name, json.dumps(result), flush=True)
    _add(arguments.json, arguments.command, results)


def _add(path: Path, command: str, results: dict[str, Any]) -> None:
    def change(report: dict[str, Any]) -> None:
        describe(path, report, "diffusers", "transformers")
        report.setdefault(command, {}).update(results)

    update(path, change)


# --- time of one forward ---------------------------------------------------------------------------------------------


def _time_together(names: list[str], variants: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every case. Each variant of each case has a process; all compile at the same time, then take turns.

    Those that do not compile make their first call before, on a machine that is not busy.
    """
    models: dict[Any, nn.Module] = {}  # the processes share their parameters
    inputs: dict[str, dict[str, Any]] = {}
    children: dict[str, dict[str, Any]] = {name: {} for name in names}
    first: dict[str, dict[str, float]] = {name: {} for name in names}
    for compiled in (False, True):
        chosen = [variant for variant in variants if (variant in _COMPILED) == compiled]
        deadline = time.monotonic() + arguments.seconds
        pending = []
        for name in names:
            case, device = CASES[name], arguments.device
            if name not in inputs:
                if case.model not in models:
                    models[case.model] = make_model(case, device, torch.bfloat16, arguments.layers)
                inputs[name] = make_inputs(case, models[case.model], device, torch.bfloat16)
        with ThreadPoolExecutor() as pool:  # a start returns when the process has imported the model's modules
            for name in names:
                shared = models[CASES[name].model], inputs[name], arguments.device
                started = pool.map(lambda variant, name=name, shared=shared: _start(name, variant, *shared), chosen)
                pending.append((name, started))
        for name, started in pending:
            children[name].update(zip(chosen, started, strict=True))
        for name in names:
            first[name].update(_first_calls(name, {v: children[name][v] for v in chosen}, deadline))
    results = {}
    for name in names:
        ready = {variant: children[name][variant] for variant in variants if variant in first[name]}
        results[name] = {
            "layers": arguments.layers or CASES[name].layers,
            "milliseconds": _take_turns(ready),
            "first-call-seconds": first[name],
        }
        _add(arguments.json, "time", {name: results[name]})
    return results


def _start(name: str, variant: str, model: nn.Module, inputs: dict[str, Any], device: str) -> Any:
    """Start the process of a variant, and return the end of its pipe. One that compiles begins at once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_run_variant, args=(name, variant, model, inputs, device, theirs), daemon=True).start()
    theirs.close()
    if variant in _COMPILED:
        ours.send(None)
    return ours


def _first_calls(name: str, children: dict[str, Any], deadline: float) -> dict[str, float]:
    """Return the seconds of the first call of each variant that is ready before the deadline.

    Those that do not compile make it one after the other.
    """
    first = {}
    for variant, pipe in children.items():
        try:
            if variant not in _COMPILED:
                pipe.send(None)
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                first[variant] = pipe.recv()
                continue
        except (EOFError, BrokenPipeError):
            pass  # it has said why
        print(f"{name}, {variant}: not ready", flush=True)
    return first


def _take_turns(ready: dict[str, Any]) -> dict[str, float]:
    """Return the median time of a call of each variant in milliseconds."""

    def measure(variant: str, calls: int) -> float:
        ready[variant].send(calls)
        return float(ready[variant].recv())

    calls = {variant: max(3, min(_MOST_CALLS, int(_ROUND_MS / measure(variant, 3)))) for variant in ready}
    times: dict[str, list[float]] = {variant: [] for variant in ready}
    for _ in range(_ROUNDS):
        for variant in ready:
            times[variant].append(measure(variant, calls[variant]))
    return {variant: statistics.median(of) for variant, of in times.items()}


def _run_variant(name: str, variant: str, model: nn.Module, inputs: dict[str, Any], device: str, pipe: Any) -> None:
    """Make the first call, send its seconds, and then time as many calls as asked for."""
    reset = CASES[name].reset
    with torch.no_grad():
        torch.ones(8, 8, device=device, dtype=torch.bfloat16) @ torch.ones(8, 8, device=device, dtype=torch.bfloat16)
        _synchronize(device)  # CUDA and cuBLAS are loaded
        pipe.recv()
        started = time.perf_counter()
        try:
            call, said = _prepare(variant, model, inputs)
            reset(inputs)
            call()
            _synchronize(device)
            first = time.perf_counter() - started
            for _ in range(3):  # a graph is captured at the second call
                reset(inputs)
                call()
            _synchronize(device)
        except Exception as error:  # a variant that does not run has no time
            print(f"{name}, {variant}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            return
        print(f"{name}, {variant}: {first:.1f} s {said}", flush=True)
        pipe.send(first)
        while True:
            try:
                calls = pipe.recv()
            except EOFError:
                return
            reset(inputs)
            call()
            pipe.send(_elapsed(call, calls, device))


def _together(case: Case, variants: list[str], device: str, layers: int | None) -> dict[str, float]:
    """Return the median milliseconds of a compiled model, and of an accelerated one, that take turns in this process.

    Where the host limits a call, equal code takes up to 40 % longer in one process than in another.
    """
    calls: dict[str, Callable[[], Any]] = {}
    times: dict[str, list[float]] = {variant: [] for variant in _chosen(variants, "compile", "compile-accelerated")}
    with torch.no_grad():
        model, inputs = make(case, device, torch.bfloat16, layers)
        for variant in times:
            calls[variant], _ = _prepare(variant, model, inputs)
            for _ in range(4):
                case.reset(inputs)
                calls[variant]()
        for _ in range(2 * _ROUNDS + 1):
            for variant, call in calls.items():
                case.reset(inputs)
                times[variant].append(_elapsed(call, 10, device))
    return {variant: statistics.median(of) for variant, of in times.items()}


def _prepare(variant: str, model: nn.Module, inputs: dict[str, Any]) -> tuple[Callable[[], Any], str]:
    """Return a call of a copy of `model` in this variant, and its report. Copies share parameters."""
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, kept)
    said = ""
    if variant in ("accelerated", "blocks", "graphs", "compile-accelerated"):
        options = {"graphs": {"graphs": True}, "blocks": {"scope": "blocks"}}.get(variant, {})
        said = str(kernel("blocks").accelerate(model, **options))
    if variant in ("compile", "compile-accelerated"):
        model = torch.compile(model)
    if variant == "reduce-overhead":
        model = torch.compile(model, mode="reduce-overhead")

    def call() -> Any:
        if variant == "reduce-overhead":  # imports the compiler, which takes seconds
            torch.compiler.cudagraph_mark_step_begin()
        return model(**inputs)

    return call, said


def _elapsed(call: Callable[[], Any], count: int, device: str) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize(device)
    return 1000 * (time.perf_counter() - started) / count


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- accuracy, training, profile -------------------------------------------------------------------------------------


def _chosen(variants: list[str], *measured: str) -> list[str]:
    return [variant for variant in measured if variant in variants]


def _output(result: Any) -> Tensor:
    return (result if isinstance(result, Tensor) else result[0]).float()


def _accuracy(case: Case, variants: list[str], device: str, layers: int | None) -> dict[str, float]:
    """Return the relative difference of each variant's output from that of the model in float32."""
    with torch.no_grad():
        model, inputs = make(case, device, torch.bfloat16, layers)
        outputs = {}
        for variant in _chosen(variants, "eager", "compile", "accelerated", "graphs"):
            call, _ = _prepare(variant, model, inputs)
            for _ in range(3 if variant == "graphs" else 1):
                case.reset(inputs)
                outputs[variant] = _output(call()).cpu()
            del call
        model.float()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        wide = {key: _widen(value) for key, value in inputs.items() if key != "past_key_values"}
        reference = _output(model(**wide)).cpu()
    return {variant: float((out - reference).norm() / reference.norm()) for variant, out in outputs.items()}


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _train(case: Case, variants: list[str], device: str, layers: int | None) -> dict[str, float]:
    """Return the milliseconds of a forward and backward pass, all parameters with gradients."""
    model, inputs = make(case, device, torch.bfloat16, layers)
    model.train()

    def step() -> None:
        model(**inputs)[0].float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    times = {}
    for variant in _chosen(variants, "eager", "accelerated"):
        if variant == "accelerated":
            kernel("blocks").accelerate(model)
        for _ in range(2):
            step()
        times[variant] = statistics.median(_elapsed(step, 3, device) for _ in range(5))
    return times


def _profile(case: Case, variants: list[str], device: str, layers: int | None) -> dict[str, Any]:
    """Return the GPU milliseconds of matrix products, attention and everything else, and the number of launches."""
    results = {}
    with torch.no_grad():
        model, inputs = make(case, device, torch.bfloat16, layers)
        for variant in _chosen(variants, "eager", "compile", "accelerated"):
            call, _ = _prepare(variant, model, inputs)
            for _ in range(3):
                case.reset(inputs)
                call()
            _synchronize(device)
            case.reset(inputs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                call()
                _synchronize(device)
            results[variant] = _split([event for event in profiled.events() if event.device_type.name == "CUDA"])
            del call
    return results


def _split(events: list[Any]) -> dict[str, Any]:
    parts = {"gemm": 0.0, "attention": 0.0, "other": 0.0}
    for event in events:
        name, milliseconds = event.name, event.device_time / 1000
        if any(word in name.lower() for word in ("gemm", "cutlass", "nvjet", "splitk", "xmma", "cublas")):
            parts["gemm"] += milliseconds
        elif any(word in name.lower() for word in ("flash", "fmha", "attention", "cudnn")):
            parts["attention"] += milliseconds
        else:
            parts["other"] += milliseconds
    return {**parts, "launches": len(events)}


# --- a whole pipeline ------------------------------------------------------------------------------------------------

_STEPS, _FRAMES = 30, 49


def _pipeline(device: str, layers: int | None) -> dict[str, float]:
    """Return the seconds of an LTX-Video pipeline, with its text encoder and VAE: 49 frames of 512x704, 30 steps."""
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline
    from transformers import T5Config, T5EncoderModel

    transformer, _ = make(CASES["ltx-2464"], device, torch.bfloat16, layers)
    with torch.device(device):
        encoder = T5Config(
            d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=layers or 24, feed_forward_proj="gated-gelu"
        )
        text_encoder = T5EncoderModel(encoder).to(torch.bfloat16).eval()
        vae = AutoencoderKLLTXVideo().to(torch.bfloat16).eval()
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = LTXPipeline(scheduler, vae, text_encoder, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    ids, mask = torch.randint(0, 30_000, (2, 128), device=device), torch.ones(2, 128, dtype=torch.bool, device=device)

    def run() -> None:
        embeddings = text_encoder(ids)[0]
        pipe(
            prompt_embeds=embeddings[:1],
            negative_prompt_embeds=embeddings[1:],
            prompt_attention_mask=mask[:1],
            negative_prompt_attention_mask=mask[1:],
            height=512,
            width=704,
            num_frames=_FRAMES,
            num_inference_steps=_STEPS if layers is None else 2,
            output_type="latent" if layers else "np",
        )

    seconds = {}
    for variant in ("eager", "accelerated", "graphs"):
        if variant != "eager":
            report = kernel("blocks").accelerate(pipe, graphs=variant == "graphs")
            print(report, flush=True)
        with torch.no_grad():
            run()
            seconds[variant] = statistics.median(_elapsed(run, 1, device) / 1000 for _ in range(3))
    return seconds


if __name__ == "__main__":
    main()
