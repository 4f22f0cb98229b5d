"""Times a training step of language models, and its memory: with `blocks`, Liger, torch.compile and neither, on a GPU.

    python benchmarks/training.py --case llama-1b --case qwen2-1.5b --json training.json

It needs Torch, transformers, liger-kernel and the public `kernels` client, which finds the packages through
LOCAL_KERNELS or on the Hub. A step is forward and backward of the loss with gradients of all parameters, of random
weights in bfloat16. Each variant has a process of its own; the processes take turns.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from model_reports import case_parser, describe, kernel, update
from torch import multiprocessing

_ROUNDS, _STEPS = 9, 5
_ROWS, _TOKENS = 4, 2048
VARIANTS = ("eager", "compile", "liger", "accelerated", "compile on accelerated", "accelerated, no logits")
_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
_QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CASES = {  # class, configuration, layers
    "llama-1b": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, 16),
    "qwen2-1.5b": ("Qwen2ForCausalLM", "Qwen2Config", _QWEN, 28),
}


def main() -> None:
    """Measure each case, and add the results to the JSON."""
    parser = case_parser(__doc__, CASES, VARIANTS)
    arguments = parser.parse_args()
    for name in arguments.case or CASES:
        result = _measure(name, arguments.variant or VARIANTS, arguments.layers)
        print(name, json.dumps(result), flush=True)

        def change(report: dict[str, Any], name: str = name, result: dict[str, Any] = result) -> None:
            describe(arguments.json, report, "transformers", "liger-kernel")
            report.setdefault("cases", {})[name] = result

        update(arguments.json, change)


def _measure(name: str, variants: Any, layers: int | None) -> dict[str, Any]:
    """Return the median milliseconds of a step of each variant, and the GiB that its process allocates at most."""
    context = multiprocessing.get_context("spawn")
    pipes, memory, loss = {}, {}, {}
    for variant in variants:
        ours, theirs = context.Pipe()
        context.Process(target=_run_variant, args=(name, variant, layers, theirs), daemon=True).start()
        theirs.close()
        try:
            memory[variant], loss[variant] = ours.recv()
            pipes[variant] = ours
        except EOFError:
            print(f"{name}, {variant}: not ready", flush=True)
    times: dict[str, list[float]] = {variant: [] for variant in pipes}
    for _ in range(_ROUNDS):
        for variant, pipe in pipes.items():
            pipe.send(None)
            times[variant].append(pipe.recv())
    return {
        variant: {"milliseconds": statistics.median(times[variant]), "gib": memory[variant], "loss": loss[variant]}
        for variant in pipes
    }


def _run_variant(name: str, variant: str, layers: int | None, pipe: Any) -> None:
    """Send the memory and the loss of a step, and then the milliseconds of a step each time that it is asked for."""
    model, inputs = _make(name, layers)
    call: Any = model
    if variant == "liger":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    elif "accelerated" in variant:
        report = kernel("blocks").accelerate(model, logits="no logits" not in variant)
    if variant.startswith("compile"):
        call = torch.compile(model)

    def step() -> torch.Tensor:
        loss = call(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loss = step().item()
    torch.cuda.empty_cache()
    pipe.send((torch.cuda.max_memory_allocated() / 2**30, loss))
    if "accelerated" in variant:
        print(report, flush=True)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        torch.cuda.empty_cache()  # the next variant needs the memory
        pipe.send(1000 * elapsed / _STEPS)


def _make(name: str, layers: int | None) -> tuple[Any, dict[str, Any]]:
    import transformers

    cls, config, options, published = CASES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = getattr(transformers, cls)(
            getattr(transformers, config)(**options, num_hidden_layers=layers or published)
        )
        ids = torch.randint(0, options["vocab_size"], (_ROWS, _TOKENS))
    torch.set_default_dtype(torch.float32)
    return model.train(), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


if __name__ == "__main__":
    main()
