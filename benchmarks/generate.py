"""Times `generate` of public language models, with and without `blocks.accelerate`, on a GPU.

    python benchmarks/generate.py --case llama-8b --json generate.json
    python benchmarks/generate.py --case qwen3-4b --variant compiled --budget 500 --json generate.json
    python benchmarks/generate.py --accuracy --json generate.json

It needs Torch, transformers and the public `kernels` client, which finds the packages through LOCAL_KERNELS or on the
Hub, and not the builder. The models have the configurations of public models and random weights in bfloat16. A case
takes one to three minutes, most of it for compiling. Figures are added to those that the JSON has of the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_reports import case_parser, describe, kernel, update
from public_models import gemma3_config, llama_config, make_model, qwen2_config, qwen3_config, qwen3_moe_config
from torch import Tensor, nn

NEW_TOKENS = 128
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
GREEDY = {"do_sample": False}
VARIANTS = ("eager", "accelerated", "graphs", "compiled")
_ROUNDS = {"eager": 3, "accelerated": 3, "graphs": 3, "compiled": 2}


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

    def model(self, layers: int) -> Any:
        """Return the model on the default device in the default dtype."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(self.config(layers))


_qwen3_4b = partial(qwen3_config, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)

CASES = {
    "llama-8b": Case(llama_config, 32, 32, 1, 200),
    "qwen2-1.5b": Case(qwen2_config, 28, 28, 1, 200),
    "qwen3-4b": Case(_qwen3_4b, 36, 36, 8, 300),
    "gemma3-4b": Case(gemma3_config, 34, 34, 1, 200),
    "qwen3-moe": Case(qwen3_moe_config, 12, 48, 1, 200),
}
_LAYERS_COMPARED = 4  # with float32
# The errors of one prompt differ from those of another by as much as those of two ways to round.
_PROMPTS_COMPARED = 8


def main() -> None:
    """Measure each case."""
    parser = case_parser(__doc__, CASES, VARIANTS)
    parser.add_argument("--budget", type=float, help="Give up a variant after so many seconds.")
    parser.add_argument(
        "--accuracy", action="store_true", help="Compare logits with float32 instead, with four layers unless --layers."
    )
    arguments = parser.parse_args()
    for name in arguments.case or list(CASES):
        if arguments.accuracy:
            accuracy = _compare_with_float32(CASES[name], arguments.layers or _LAYERS_COMPARED)
            print(name, json.dumps(accuracy), flush=True)
            _add(arguments.json, name, {"accuracy": accuracy})
        else:
            _measure(name, CASES[name], arguments)
        torch.cuda.empty_cache()


def _add(path: Path, name: str, result: dict[str, Any]) -> None:
    """Add figures of a case. One that could not be measured replaces none that was."""

    def change(report: dict[str, Any]) -> None:
        describe(path, report, "transformers")
        report["new-tokens"] = NEW_TOKENS
        case = report.setdefault("cases", {}).setdefault(name, {})
        case.update({key: value for key, value in result.items() if key not in case or not _failed(value)})

    update(path, change)


def _failed(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"did not end within the {seconds:g} s of its budget")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _make(case: Case, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return the model of a case, and the arguments of its `generate`."""
    model = make_model(case, "cuda", torch.bfloat16, layers)
    vocabulary = model.config.vocab_size
    # With an id that ends a sequence every loop has to look for it. A sequence that ends early would not count.
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [vocabulary - 1, vocabulary - 2]
    return model, _prompt(case, model)


def _prompt(case: Case, model: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for random tokens."""
    prompt = torch.randint(3, model.config.vocab_size - 9, (case.batch, case.prompt), device="cuda")
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def _measure(name: str, case: Case, arguments: argparse.Namespace) -> None:
    """Measure the variants of a case, and add each to the JSON when it is measured."""
    layers = arguments.layers or case.layers
    model, inputs = _make(case, layers)
    about = {
        "batch": case.batch,
        "layers": layers,
        "published-layers": case.published,
        "floor-tokens-per-second": case.batch * _copy_speed() / _read_per_token(model),
    }
    _generate(model, inputs, 4)  # CUDA and its libraries are loaded
    expected = None
    for variant in arguments.variant or VARIANTS:
        outputs = None
        try:
            with _at_most(arguments.budget):
                result, outputs = _measure_variant(variant, model, inputs)
        except Exception as error:  # a variant that does not run has no time
            result = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        if variant == "eager":
            expected = outputs
        elif outputs is not None and expected is not None:
            result["beside-eager"] = _compare(outputs, expected, case.prompt)
        print(name, variant, json.dumps(result), flush=True)
        _add(arguments.json, name, {**about, variant: result})


def _measure_variant(variant: str, model: nn.Module, inputs: dict[str, Any]) -> tuple[dict, Any]:
    """Return the times of a variant, and the generated tokens with their logits."""
    options = {"cache_implementation": "static"} if variant == "compiled" else {}
    with_graphs, kept = variant == "graphs", {"return_dict_in_generate": True, "output_logits": True}
    torch.cuda.synchronize()
    watch = _Watch()
    accelerated = variant in ("accelerated", "graphs")
    if accelerated:
        kernel("blocks").accelerate(model, graphs=with_graphs)
    result: dict[str, Any] = {}
    try:
        _generate(model, inputs, NEW_TOKENS, **options, **GREEDY, streamer=watch)
        result["seconds-to-token"] = {str(number): watch.tokens[number] for number in (0, 1, 2)}
        for kind, how in (("greedy", GREEDY), ("sampling", SAMPLING)):
            if kind == "greedy" or with_graphs:
                # A step runs, then is captured, then is replayed. Compiled models may compile again.
                if variant in ("compiled", "graphs"):
                    _generate(model, inputs, NEW_TOKENS, **options, **how)
                times = [_time(model, inputs, **options, **how) for _ in range(_ROUNDS[variant])]
                speed = statistics.median(tokens / seconds for seconds, tokens in times)
                result[kind] = {"tokens-per-second": speed}
        outputs = None
        if variant in ("eager", "graphs"):
            output = _generate(model, inputs, NEW_TOKENS, **options, **GREEDY, **kept)
            outputs = output.sequences, [logits.cpu() for logits in output.logits]
        return result, outputs
    finally:
        if accelerated:
            kernel("blocks").restore(model)


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
    explained = True
    for row in range(theirs.shape[0]):
        length = min(ours.shape[1], theirs.shape[1]) - prompt
        for index in range(length):
            if ours[row, prompt + index] != theirs[row, prompt + index]:
                best = their_logits[index][row].topk(2).values
                rounding = (our_logits[index][row] - their_logits[index][row]).abs().max()
                explained &= bool(best[0] - best[1] <= 2 * rounding)
                break
    return {"explained": explained}


def _compare_with_float32(case: Case, layers: int) -> dict[str, Any]:
    """Compare the logits of each token with those of the same weights in float32, after the same tokens.

    The tokens are those that graphs choose in greedy mode, which a processor forces upon the others. One may differ
    from the eager model's choice where its two best logits differ by no more than the rounding of both.
    """
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forced(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, chosen: Tensor) -> None:
            self._chosen = chosen

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            forced = torch.full_like(scores, float("-inf"))
            return forced.scatter(1, self._chosen[:, input_ids.shape[1], None], 0)

    model, first = _make(case, layers)
    prompts = [first, *(_prompt(case, model) for _ in range(_PROMPTS_COMPARED - 1))]
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    kernel("blocks").accelerate(model, graphs=True)
    _generate(model, first, NEW_TOKENS, **options)  # a step runs, then is captured; from here on it is replayed
    outputs = [_generate(model, prompt, NEW_TOKENS, **options) for prompt in prompts]
    kernel("blocks").restore(model)
    logits = {"graphs": torch.stack([torch.stack(output.logits) for output in outputs])}

    def forced() -> Tensor:
        of_prompts = []
        for prompt, output in zip(prompts, outputs, strict=True):
            processors = LogitsProcessorList([Forced(output.sequences)])
            same = _generate(model, prompt, NEW_TOKENS, **options, logits_processor=processors)
            of_prompts.append(torch.stack(same.logits))
        return torch.stack(of_prompts)

    logits["eager"] = forced().float()
    model.float()
    reference = forced()
    differences = {variant: (of - reference).abs() for variant, of in logits.items()}
    best = logits["eager"].topk(2)
    chosen = torch.stack([output.sequences[:, case.prompt :].T for output in outputs])
    ends = torch.isin(chosen, torch.tensor(model.generation_config.eos_token_id, device=chosen.device)).int()
    is_text = ends.cumsum(1) - ends == 0  # tokens after an end are padding
    differs = (best.indices[..., 0] != chosen) & is_text
    rounding = sum(difference.amax(-1) for difference in differences.values())
    unexplained = differs & (best.values[..., 0] - best.values[..., 1] > rounding)
    return {
        "layers": layers,
        "rms-error": {variant: float(of.square().mean().sqrt()) for variant, of in differences.items()},
        "tokens": int(is_text.sum()),
        "unexplained": int(unexplained.sum()),
    }


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


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
