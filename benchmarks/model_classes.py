"""Runs small random models whose classes `blocks` names nowhere with the kernels, on the CPU, and records the errors.

    kernel-builder build kernels/* && python benchmarks/model_classes.py

Writes benchmarks/results/model-classes.json, from which `pages.py` makes a table of docs/models.md. Errors are relative
to the same model in float64: of the model in float32, and in bfloat16 the root of the mean square over seeds.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import torch
from recording import RESULTS, ROOT, write

_SEEDS = range(3)


def main() -> None:
    """Measure every model, and write the JSON."""
    sys.path.insert(0, str(ROOT / "kernels" / "blocks" / "tests"))
    from model_cases import RecordedModel
    from new_models import NAMES, new_model

    blocks = load_blocks()
    torch.set_num_threads(1)
    models = [measure(name, new_model, lambda model: RecordedModel(blocks, model)) for name in NAMES]
    write(RESULTS / "model-classes.json", {"versions": blocks.Report().versions, "models": models})


def measure(name: str, new_model: Any, accelerated: Any) -> dict[str, Any]:
    """Return the number of replaced operations, and the errors of eager and accelerated."""
    errors = {"float32": [0.0, 0.0], "bfloat16": [0.0, 0.0]}
    for seed in _SEEDS:
        model, run = new_model(name, seed)
        reference = run(copy.deepcopy(model).double())
        for dtype, sums in errors.items():
            model = model.to(getattr(torch, dtype))
            faster = accelerated(model)
            sums[0] += _square(run(model), reference)
            sums[1] += _square(run(faster), reference)
    print(f"{name}: {faster.kernels.total()} replaced", flush=True)
    return {
        "class": type(model).__name__,
        "replaced": faster.kernels.total(),
        "errors": {dtype: [(total / len(_SEEDS)) ** 0.5 for total in sums] for dtype, sums in errors.items()},
    }


def _square(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).item() ** 2)


def load_blocks() -> Any:
    """Return the built package of blocks, with the built kernels beside it."""
    from kernels import get_local_kernel

    project = ROOT / "kernels" / "blocks"
    depends = json.loads(next(project.glob("build/*/metadata.json")).read_text())["kernel-depends"]
    names = [depend["repo-id"] for depend in depends]
    local = [f"{name}={project.parent / name.partition('/')[2]}" for name in names]
    os.environ["LOCAL_KERNELS"] = os.pathsep.join([*local, *filter(None, [os.environ.get("LOCAL_KERNELS")])])
    return get_local_kernel(project)


if __name__ == "__main__":
    main()
