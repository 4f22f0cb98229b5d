"""FlashInfer-Bench: a definition of a data set with `workloads/`, `solutions/` and `blob/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernel_format.errors import ConfigError
from kernel_tasks.definition_models import DEFINITION, read_json
from kernel_tasks.definitions import Format, Rule, read_definition
from kernel_tasks.task import Task

# The defaults of the public evaluator, and the share of the elements for definitions of this kind.
_TOLERANCE, _MOE_SHARE = 1e-2, 0.95
_LEAST = 1e-8


def _fault(rule: Rule, result: torch.Tensor, expected: torch.Tensor) -> str | None:
    if not bool(result.isfinite().all()):
        return "it has elements that are not finite"
    error = (result - expected).abs()
    wrong = (error > rule.absolute) & (error / (expected.abs() + _LEAST) > rule.relative)
    share = 1.0 - float(wrong.sum()) / max(wrong.numel(), 1)
    if share >= rule.share:
        return None
    return f"{share:.2%} of the elements are within the tolerance, the largest error is {float(error.max()):.3g}"


def _rule(definition: Mapping[str, Any], workload: Mapping[str, Any]) -> Rule:
    is_moe = definition.get("op_type") == "moe" or "moe_fp8_block_scale" in definition["name"]
    return Rule(_TOLERANCE, _TOLERANCE, _MOE_SHARE if is_moe else 1.0, _fault)


_FORMAT = Format("workloads/{name}.jsonl", _rule, lambda name, spec, shape: None)


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
    task = read_definition(file, found[0] if found else root / f"workloads/{name}.jsonl", root, _FORMAT)
    if definition.get("op_type") == "sampling" or name.startswith(("dsa_topk_indexer", "dsa_sparse_attention")):
        raise ConfigError(
            f"{name} has an evaluator of its own, which compares frequencies or sets",
            where=f"{file}: op_type",
            hint="use flashinfer-bench",
        )
    task.is_elementwise = _rule(definition, {}).share == 1.0
    return task


def _data_set(file: Path) -> Path | None:
    """Return the root of the data set of a definition: the nearest directory above it with `workloads/`."""
    return next((parent for parent in file.resolve().parents if (parent / "workloads").is_dir()), None)
