"""SOL-ExecBench: a directory with `definition.json` and `workload.jsonl`.

Its random inputs depend on the names of the inputs, and each workload has a tolerance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_tasks.definition_models import DEFINITION
from kernel_tasks.definitions import DefinitionTask, read_definition
from kernel_tasks.task import Task

FORMAT = "SOL-ExecBench: a directory with definition.json and workload.jsonl"
_WORKLOADS = "workload.jsonl"
_DEFAULTS = {
    "max_atol": 1e-2,
    "max_rtol": 1e-2,
    "required_matched_ratio": 0.99,
    "max_error_cap": None,
    "allow_negative_inf": False,
}


@dataclass
class SolExecBenchTask(DefinitionTask):
    """A problem, whose workloads have tolerances."""

    layout = _WORKLOADS
    is_elementwise: bool = False  # a share of the elements may be off

    def wrong(self, workload: Mapping[str, Any], result: torch.Tensor, expected: torch.Tensor) -> str | None:
        """Return why an output is wrong by the workload's tolerance, or None."""
        stated = _DEFAULTS | (workload.get("tolerance") or {})
        if stated["allow_negative_inf"]:
            finite = ~((result == -math.inf) & (expected == -math.inf))
            result, expected = result[finite], expected[finite]
        if not bool(result.isfinite().all() & expected.isfinite().all()):
            return "it has elements that are not finite"
        if bool(expected.any()) and not bool(result.any()):
            return "all of its elements are 0"
        error = (result - expected).abs()
        off = error > stated["max_atol"] + stated["max_rtol"] * expected.abs()
        share = 1.0 - float(off.sum()) / max(off.numel(), 1)
        largest = float(error.max()) if error.numel() else 0.0
        if share < stated["required_matched_ratio"]:
            return f"{share:.2%} of the elements are within the tolerance, the largest error is {largest:.3g}"
        if stated["max_error_cap"] is not None and largest > stated["max_error_cap"]:
            return f"the largest error is {largest:.3g}, above max_error_cap"
        return None

    def tolerance(self) -> str:
        """Return the rule for right results."""
        stated = _DEFAULTS | (next(iter(self.sources.values())).get("tolerance") or {})
        return ", ".join(f"{name} = {value}" for name, value in stated.items())

    def special(self, name: str, spec: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the values that the public evaluator draws by an input's name and description; None if it has none."""
        dtype: torch.dtype = getattr(torch, spec["dtype"])
        text = (spec.get("description") or "").lower()
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return None
        base = name.rstrip("0123456789")
        if name == "norm_weight" or re.search(r"(_norm|layernorm|norm\d+)_weight$", name):
            return torch.ones(shape, dtype=dtype)
        if name == "norm_bias" or re.search(r"(_norm|layernorm|norm\d+)_bias$", name):
            return torch.zeros(shape, dtype=dtype)
        is_square = len(shape) >= 2 and shape[-1] == shape[-2]
        if is_square and (name in ("attention_mask", "causal_mask") or ("attention mask" in text and "causal" in text)):
            future = torch.ones(shape[-2:]).triu(1).bool()
            return torch.zeros(shape, dtype=dtype).masked_fill(future, torch.finfo(dtype).min)
        is_binary = any(word in text for word in ("binary", "{0, 1}", "0 or 1", "1.0 for valid", "0.0 for masked"))
        masks = ("x_mask", "text_mask", "aspect_ratio_mask", "drop_mask", "attention_mask")
        if name in masks or (name.endswith("_mask") and is_binary):
            return torch.randint(0, 2, shape).to(dtype)
        if re.fullmatch(r"(rope_)?(cos|sin)|(cos|sin)_cached", name):
            angles = torch.randn(shape).clamp_(-math.pi, math.pi)
            return (angles.cos() if "cos" in name else angles.sin()).to(dtype)
        if re.fullmatch(r"(.*_)?(rstd|std|variance|var)", name) or re.fullmatch(
            r"rstd|std|variance|var|.*_(rstd|std|var)", base
        ):
            return torch.randn(shape, dtype=dtype).abs() + 0.1
        if name == "A_cumsum":
            return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.0).cumsum(-1)
        decays = {"A_log": (-5.0, -1.0), "A": (-1.0, -0.001), "g": (-5.0, 0.0)}
        if name in decays:
            return torch.empty(shape, dtype=dtype).uniform_(*decays[name])
        if name in ("attn_weights", "attention_weights", "routing_weights") or ("softmax" in text and "output" in text):
            return torch.randn(shape).softmax(-1).to(dtype)
        if len(shape) >= 2 and re.fullmatch(r"weight|.*_(weights?|projs?|weight_matrix)", base):
            return torch.randn(shape, dtype=dtype) / math.sqrt(shape[-1])
        return None


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory with `definition.json` and `workload.jsonl`, or that definition."""
    directory = path if path.is_dir() else path.parent
    return (directory / _WORKLOADS).is_file() and (path.is_dir() or path.name == DEFINITION)


def read(path: Path) -> Task:
    """Read a problem's directory, or its `definition.json`."""
    directory = path if path.is_dir() else path.parent
    return read_definition(SolExecBenchTask, directory / DEFINITION, directory / _WORKLOADS, directory)
