"""Accelerate small random models whose classes `blocks` names nowhere, on the CPU, and write what became of them.

    kernel-builder build kernels/* && python benchmarks/model_classes.py

Writes benchmarks/results/model-classes.json, from which `models_page.py` makes a table of docs/models.md. Errors are
relative to the same model in float64: of the model in float32, and in bfloat16 the root of the mean square over seeds.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import result_files
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "model-classes.json"
_SEEDS = range(3)


def main() -> None:
    """Measure every model, and write the JSON."""
    sys.path.insert(0, str(ROOT / "kernels" / "blocks" / "tests"))
    from new_models import NAMES, new_model

    blocks = _load()
    torch.set_num_threads(1)
    models = {name: measure(blocks, name, new_model) for name in NAMES}
    seconds = deep(blocks)
    versions = blocks.Report().versions
    result_files.write(RESULTS, {"versions": versions, "seconds": seconds, "models": models})


def deep(blocks: Any) -> dict[str, float]:
    """Return the seconds of CPU time that it takes to accelerate models of many layers, whose classes are new to it."""
    from diffusers import FluxTransformer2DModel
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**sizes, "head_dim": 20, "num_hidden_layers": 80, "vocab_size": 9}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    image = {"in_channels": 8, "num_attention_heads": 2, "attention_head_dim": 24, "axes_dims_rope": (8, 8, 8)}
    made = {
        "Llama, 80 layers": lambda: LlamaForCausalLM(LlamaConfig(**text)),
        "Qwen3-MoE, 80 layers": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **experts)),
        "Flux.1, 40 + 60 blocks": lambda: FluxTransformer2DModel(
            **image, num_layers=40, num_single_layers=60, joint_attention_dim=8, pooled_projection_dim=8
        ),
    }
    seconds = {}
    for name, make in made.items():
        model = make()
        start = time.process_time()
        report = blocks.accelerate(model)
        seconds[name] = round(time.process_time() - start, 2)
        print(f"{name}: {sum(report.replaced.values())} replaced, {seconds[name]} s", flush=True)
    return seconds


def measure(blocks: Any, name: str, new_model: Any) -> dict[str, Any]:
    """Return what was replaced in a model and what was left, the seconds that took, and the errors."""
    errors = {"float32": [0.0, 0.0], "bfloat16": [0.0, 0.0]}
    report: Any = None
    seconds = 0.0
    for seed in _SEEDS:
        model, run = new_model(name, seed)
        reference = run(copy.deepcopy(model).double())
        for dtype, sums in errors.items():
            model = model.to(getattr(torch, dtype))
            sums[0] += _square(run(model), reference)
            start = time.perf_counter()
            made = blocks.accelerate(model)
            if report is None:
                report, seconds = made, time.perf_counter() - start
            sums[1] += _square(run(model), reference)
            blocks.restore(model)
    print(f"{name}: {sum(report.replaced.values())} replaced, {seconds:.2f} s", flush=True)
    return {
        "class": type(model).__name__,
        "replaced": [[cls, does, count] for (cls, does), count in report.replaced.items()],
        "left": [[cls, reason, count] for (cls, reason), count in report.left.items()],
        "seconds": round(seconds, 3),
        "errors": {dtype: [(total / len(_SEEDS)) ** 0.5 for total in sums] for dtype, sums in errors.items()},
    }


def _square(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).item() ** 2)


def _load() -> Any:
    """Return the package as built, with the kernels as built beside it."""
    from kernels import get_local_kernel

    project = ROOT / "kernels" / "blocks"
    depends = json.loads(next(project.glob("build/*/metadata.json")).read_text())["kernel-depends"]
    names = [depend["repo-id"] for depend in depends]
    local = [f"{name}={project.parent / name.partition('/')[2]}" for name in names]
    os.environ["LOCAL_KERNELS"] = os.pathsep.join([*local, *filter(None, [os.environ.get("LOCAL_KERNELS")])])
    return get_local_kernel(project)


if __name__ == "__main__":
    main()
