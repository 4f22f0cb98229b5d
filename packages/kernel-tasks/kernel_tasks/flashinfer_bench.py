"""FlashInfer-Bench: a definition of a data set with `workloads/`, `solutions/` and `blob/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernel_format.errors import ConfigError
from kernel_tasks.definition_models import DEFINITION, read_json
from kernel_tasks.definitions import DefinitionTask, read_definition
from kernel_tasks.task import Task

FORMAT = "FlashInfer-Bench: a definition (JSON) with workloads/NAME.jsonl in its directory or one above"
# The defaults of the public evaluator, and the share of the elements for definitions of mixtures of experts.
_TOLERANCE, _MOE_SHARE = 1e-2, 0.95
_LEAST = 1e-8


class FlashInferBenchTask(DefinitionTask):
    """A definition of a data set."""

    layout = "workloads/{name}.jsonl"

    @property
    def _share(self) -> float:
        is_moe = self.definition.get("op_type") == "moe" or "moe_fp8_block_scale" in self.name
        return _MOE_SHARE if is_moe else 1.0

    def wrong(self, workload: Mapping[str, Any], result: torch.Tensor, expected: torch.Tensor) -> str | None:
        """Return why an output is wrong by the defaults of the public evaluator, or None."""
        if not bool(result.isfinite().all()):
            return "it has elements that are not finite"
        error = (result - expected).abs()
        off = (error > _TOLERANCE) & (error / (expected.abs() + _LEAST) > _TOLERANCE)
        share = 1.0 - float(off.sum()) / max(off.numel(), 1)
        if share >= self._share:
            return None
        return f"{share:.2%} of the elements are within the tolerance, the largest error is {float(error.max()):.3g}"

    def tolerance(self) -> str:
        """Return the rule for right results."""
        return f"{self._share:.0%} of the elements within {_TOLERANCE} absolute or relative error"


def recognizes(path: Path) -> bool:
    """Return whether a path is a definition with `workloads/` beside it or in its data set, or a directory with one."""
    file = path / DEFINITION if path.is_dir() else path
    return file.suffix == ".json" and file.is_file() and _data_set(file) is not None


def read(path: Path) -> Task:
    """Read `definition.json`, or a definition in `definitions/` of a data set."""
    file = (path / DEFINITION if path.is_dir() else path).resolve()
    root = _data_set(file)
    assert root
    definition = read_json(file)
    name = str(definition.get("name"))
    found = sorted((root / "workloads").rglob(f"{name}.jsonl"))
    task = read_definition(FlashInferBenchTask, file, found[0] if found else root / f"workloads/{name}.jsonl", root)
    if definition.get("op_type") == "sampling" or name.startswith(("dsa_topk_indexer", "dsa_sparse_attention")):
        problem = f"{name} has an evaluator of its own, which compares frequencies or sets"
        raise ConfigError(problem, where=f"{file}: op_type", hint="use flashinfer-bench")
    task.is_elementwise = task._share == 1.0
    return task


def _data_set(file: Path) -> Path | None:
    """Return the root of the data set of a definition: the nearest directory above it with `workloads/`."""
    return next((parent for parent in file.resolve().parents if (parent / "workloads").is_dir()), None)
