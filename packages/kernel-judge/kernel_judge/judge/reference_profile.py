"""Saves the code that `torch.compile` generates for a task's reference, and the reference's profile.

    python -m kernel_judge.judge.reference_profile (code | profile | once | compiled) TASK DIRECTORY

The last two call the reference a single time, for profilers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kernel_judge.judge.task import read_task

_NCU_KERNELS = 20
_ROWS = 30
_LOG_MARK = "[__output_code]"


def _reference(task: Path) -> tuple[torch.nn.Module, list[Any], str]:
    """Return the reference, arguments for one call, and the device; sizes and dtype are those of the timed call."""
    read = read_task(task)
    device = read.settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    problem = read.problem(read.settings.sizes)
    dtype = getattr(torch, read.settings.dtypes[0]) if read.settings.dtypes else None
    model = problem.Model(*problem.get_init_inputs()).to(device, dtype).eval()
    arguments = [_moved(value, device, dtype) for value in problem.get_inputs()]
    return model, arguments, device


def _moved(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _call(task: Path, *, compiled: bool) -> None:
    model, arguments, _ = _reference(task)
    with torch.no_grad():
        (torch.compile(model) if compiled else model)(*arguments)


def _save_code(task: Path, directory: Path) -> None:
    """Write the code that `torch.compile` generates: C++ on the CPU, Triton on a GPU, with the Python that calls it."""
    script = [sys.executable, "-m", "kernel_judge.judge.reference_profile", "compiled", str(task), str(directory)]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        settings = {
            "TORCH_LOGS": "output_code",
            "TORCH_LOGS_OUT": str(log),
            "TORCHINDUCTOR_CACHE_DIR": scratch,  # code that is taken from a cache is not logged
        }
        subprocess.run(script, env={**os.environ, **settings}, check=True)
        lines = [line.partition(_LOG_MARK)[2] for line in log.read_text(encoding="utf-8").splitlines()]
    code = "\n".join(line.removeprefix(" ") for line in lines if "Output code" not in line)
    (directory / "compiled.py").write_text(code + "\n", encoding="utf-8")


def _save_profile(task: Path, directory: Path) -> None:
    """Write a table of the operators and kernels of three calls, and ncu's summary of each kernel if ncu is there."""
    model, arguments, device = _reference(task)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.no_grad():
        model(*arguments)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            for _ in range(3):
                model(*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
    averages = profile.key_averages(group_by_input_shape=True)
    shown = averages.table(sort_by=f"self_{device}_time_total", row_limit=_ROWS)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    (directory / "profile.txt").write_text(f"Three calls of the reference on {name}\n\n{shown}\n")
    if device == "cuda" and (ncu := shutil.which("ncu")):
        again = [sys.executable, "-m", "kernel_judge.judge.reference_profile", "once", str(task), str(directory)]
        options = ["--target-processes", "all", "--launch-count", str(_NCU_KERNELS)]
        done = subprocess.run([ncu, *options, *again], capture_output=True, text=True, check=False)
        # Without the right to read the counters, this is ncu's explanation.
        (directory / "ncu.txt").write_text(done.stdout + done.stderr)


if __name__ == "__main__":
    action, path, where = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if action in ("once", "compiled"):
        _call(path, compiled=action == "compiled")
    else:
        {"code": _save_code, "profile": _save_profile}[action](path, where)
