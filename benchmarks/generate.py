"""Times `generate` of public language models, with and without `blocks.accelerate`, on a GPU.

    python benchmarks/generate.py --case llama-8b --json generate.json
    python benchmarks/generate.py --case qwen3-4b --case gemma3-4b --case qwen3-moe --json generate.json

It needs Torch, transformers and the public `kernels` client, which finds the packages through LOCAL_KERNELS or on the
Hub, and not the builder. The models have the configurations of public models and random weights in bfloat16. A case
takes one to three minutes, most of it for compiling; results are added to the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NEW_TOKENS = 128
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
GREEDY = {"do_sample": False}
VARIANTS = ("eager", "accelerated", "graphs", "compiled")
_ROUNDS = {"eager": 1, "accelerated": 1, "graphs": 3, "compiled": 2}


@dataclass(frozen=True)
class Case:
    """A model and a prompt.

    Attributes:
        config: Makes its configuration, given the number of layers.
        layers: The number of layers that are timed.
        published: The number of layers that the public model has.
        batch: Sequences at a time.
        prompt: Tokens of each prompt.
    """

    config: Callable[[int], Any]
    layers: int
    published: int
    batch: int
    prompt: int


def _llama(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )


def _qwen3(layers: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def _gemma3(layers: int) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
    )


def _qwen3_moe(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


CASES = {
    "llama-8b": Case(_llama, 32, 32, 1, 200),
    "qwen3-4b": Case(_qwen3, 36, 36, 8, 300),
    "gemma3-4b": Case(_gemma3, 34, 34, 1, 200),
    "qwen3-moe": Case(_qwen3_moe, 12, 48, 1, 200),
}


def main() -> None:
    """Measure each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="Only this case; may be repeated.")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="Only this variant; may be repeated.")
    parser.add_argument("--json", type=Path, required=True, help="Add the results to this file.")
    parser.add_argument("--layers", type=int, help="Use as many layers as this, to try the script.")
    parser.add_argument("--profile", action="store_true", help="Also print the GPU's kernels of a token with graphs.")
    arguments = parser.parse_args()
    for name in arguments.case or list(CASES):
        _measure(name, CASES[name], arguments)
        torch.cuda.empty_cache()


def _add(path: Path, name: str, result: dict[str, Any]) -> None:
    import transformers

    report = json.loads(path.read_text()) if path.exists() else {}
    report["machine"] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    report["new-tokens"] = NEW_TOKENS
    report.setdefault("cases", {})[name] = result
    path.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")


def _blocks() -> Any:
    from kernels import get_kernel

    return get_kernel("kernels-community/blocks", version=1)


def _measure(name: str, case: Case, arguments: argparse.Namespace) -> None:
    """Measure the variants of a case, and add each to the JSON when it is measured."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    layers = arguments.layers or case.layers
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(case.config(layers), dtype=torch.bfloat16).eval()
    vocabulary = model.config.vocab_size
    # With an id that ends a sequence every loop has to look for it. A sequence that ends early would not count.
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [vocabulary - 1, vocabulary - 2]
    prompt = torch.randint(3, vocabulary - 9, (case.batch, case.prompt), device="cuda")
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    copy_speed = _copy_speed()
    floor = _read_per_token(model) / copy_speed
    result: dict[str, Any] = {
        "batch": case.batch,
        "prompt": case.prompt,
        "layers": layers,
        "published-layers": case.published,
        "copy-bytes-per-second": copy_speed,
        "floor-ms-per-token": 1000 * floor,
        "floor-tokens-per-second": case.batch / floor,
    }
    _generate(model, inputs, 4)  # CUDA and its libraries are loaded
    expected = None
    for variant in arguments.variant or VARIANTS:
        try:
            result[variant], outputs = _measure_variant(variant, model, inputs, arguments.profile)
        except Exception as error:  # a variant that does not run has no time
            result[variant] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            print(name, variant, result[variant], flush=True)
            continue
        if variant == "eager":
            expected = outputs
        elif outputs is not None and expected is not None:
            result[variant]["beside-eager"] = _compare(outputs, expected, case.prompt)
        print(name, variant, json.dumps(result[variant]), flush=True)
        _add(arguments.json, name, result)


def _measure_variant(variant: str, model: nn.Module, inputs: dict[str, Any], profiled: bool) -> tuple[dict, Any]:
    """Return the times of a variant, and what it generated with the logits of each token."""
    options = {"cache_implementation": "static"} if variant == "compiled" else {}
    with_graphs, kept = variant == "graphs", {"return_dict_in_generate": True, "output_logits": True}
    torch.cuda.synchronize()
    watch = _Watch()
    report = None
    if variant in ("accelerated", "graphs"):
        report = _blocks().accelerate(model, graphs=with_graphs)
    result: dict[str, Any] = {"accelerate-seconds": watch.seconds()}
    try:
        _generate(model, inputs, NEW_TOKENS, **options, **GREEDY, streamer=watch)
        result["first-call-seconds"] = watch.seconds()
        result["seconds-to-token"] = {str(number): watch.tokens[number] for number in (0, 1, 2)}
        for kind, how in (("greedy", GREEDY), ("sampling", SAMPLING)):
            if kind == "greedy" or with_graphs:
                # A step runs, then is captured, then is replayed. Compiled models may compile again.
                if variant in ("compiled", "graphs"):
                    _generate(model, inputs, NEW_TOKENS, **options, **how)
                times = [_time(model, inputs, **options, **how) for _ in range(_ROUNDS[variant])]
                result[kind] = {
                    "tokens-per-second": statistics.median(tokens / seconds for seconds, tokens in times),
                    "seconds": [seconds for seconds, _ in times],
                    "tokens": [tokens for _, tokens in times],
                }
        result["peak-bytes"] = torch.cuda.max_memory_allocated()
        if profiled and with_graphs:
            _print_profile(model, inputs)
        outputs = None
        if variant in ("eager", "graphs"):
            output = _generate(model, inputs, NEW_TOKENS, **options, **GREEDY, **kept)
            outputs = output.sequences, [logits.cpu() for logits in output.logits]
        if report is not None:
            result["report"] = str(report)
        return result, outputs
    finally:
        if report is not None:
            _blocks().restore(model)


class _Watch:
    """A streamer that takes the time of each token."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.tokens: list[float] = []
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt:
            self.tokens.append(self.seconds())
        self._is_prompt = False

    def end(self) -> None:
        pass

    def seconds(self) -> float:
        return time.perf_counter() - self._started


def _generate(model: Any, inputs: dict[str, Any], count: int, **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=count, **options)


def _time(model: Any, inputs: dict[str, Any], count: int = NEW_TOKENS, **options: Any) -> tuple[float, int]:
    """Return the seconds of one call, and the number of tokens that it generated."""
    torch.manual_seed(1)
    torch.cuda.synchronize()
    started = time.perf_counter()
    output = _generate(model, inputs, count, **options)
    torch.cuda.synchronize()
    new = output.shape[1] - inputs["input_ids"].shape[1]
    return time.perf_counter() - started, new * output.shape[0]


def _compare(outputs: Any, expected: Any, prompt: int) -> dict[str, Any]:
    """Compare the tokens of each sequence with the eager model's, up to the first that differs.

    A token may differ where the two best logits are closer to each other than the logits of both models are. After it,
    the models have other texts before them.
    """
    (ours, our_logits), (theirs, their_logits) = outputs, expected
    equal, gaps, explained = 0, [], True
    for row in range(theirs.shape[0]):
        length = min(ours.shape[1], theirs.shape[1]) - prompt
        for index in range(length):
            if ours[row, prompt + index] == theirs[row, prompt + index]:
                equal += 1
                continue
            best = their_logits[index][row].topk(2).values
            rounding = (our_logits[index][row] - their_logits[index][row]).abs().max()
            gaps.append({"token": index, "gap": float(best[0] - best[1]), "rounding": float(rounding)})
            explained &= bool(best[0] - best[1] <= 2 * rounding)
            break
    return {"equal": equal, "of": theirs.shape[0] * (theirs.shape[1] - prompt), "first": gaps, "explained": explained}


def _copy_speed() -> float:
    """Return the bytes that a copy reads and writes a second, the best of some."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * source.nbytes / (start.elapsed_time(end) / 1000))
    return best


def _read_per_token(model: Any) -> float:
    """Return the bytes of the weights that one step reads: of a mixture of experts, those of the chosen ones."""
    config = model.config
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or tied:
            total += parameter.nbytes * (share if ".experts." in name else 1)
    return total


def _print_profile(model: Any, inputs: dict[str, Any], count: int = 32) -> None:
    """Print the milliseconds a token of the GPU's kernels, and of its idle time between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        _generate(model, inputs, count, **GREEDY)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    # Without the prefill and the first tokens.
    events = events[len(events) // 2 :]
    span = events[-1].time_range.end - events[0].time_range.start
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    tokens = count / 2
    busy = sum(map(sum, by_name.values())) / 1000 / tokens
    each = len(events) / tokens
    print(f"GPU: {span / 1000 / tokens:.3f} ms a token, busy {busy:.3f}, {each:.0f} kernels")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]:
        mean = sum(times) / len(times)
        print(f"  {sum(times) / 1000 / tokens:7.4f} ms  {len(times) / tokens:6.1f} x {mean:7.2f} us  {name[:150]}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
