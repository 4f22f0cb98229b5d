"""`make quickstart`: takes kernels/rmsnorm from its sources to `get_kernel`, and prints each command on the way.

Builds the variants of the CPU and of the newest CUDA, which today's Torch loads, uploads them to a Hub server that runs
in the meantime, loads the kernel from there with the public client, compares it with a float64 reference, and times it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "kernels" / "rmsnorm"
REPOSITORY = "kernels-community/rmsnorm"
BUILDER = Path(sys.executable).with_name("kernel-builder")

NEXT = """
Next
  .venv/bin/kernel-builder init you/my-kernel          # a new project that builds, tests and benchmarks as it is
  .venv/bin/kernel-builder build my-kernel             # my-kernel/build/<variant>/
  .venv/bin/kernel-builder check-builds my-kernel      # the checks that the Hub and older machines need
  .venv/bin/kernel-builder benchmark my-kernel         # correctness, and speed compared with PyTorch
  .venv/bin/kernel-builder upload my-kernel            # to huggingface.co, or to the server in HF_ENDPOINT

README.md and docs/build-toml.md continue from here."""


def check_and_time() -> None:
    """Load the kernel from the Hub, compare it with float64 and time it beside eager PyTorch.

    Raises:
        SystemExit: If the kernel's error exceeds eager PyTorch's by more than 10 %.
    """
    import torch
    from kernels import get_kernel
    from torch.utils.benchmark import Timer

    def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        variance = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + 1e-6) * weight.float()).to(x.dtype)

    kernel = get_kernel(REPOSITORY, version=1, backend="cpu")
    for shape in ((512, 4096), (4096, 1024)):
        x, weight = torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape[1], dtype=torch.bfloat16)
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        errors, seconds = [], []
        for function in (kernel.rms_norm, eager):
            errors.append(float((function(x, weight).double() - exact).norm() / exact.norm()))
            names = {"function": function, "x": x, "weight": weight}
            timer = Timer("function(x, weight)", globals=names, num_threads=torch.get_num_threads())
            seconds.append(timer.blocked_autorange(min_run_time=0.3).median)
        if not errors[0] <= errors[1] * 1.1:
            raise SystemExit(f"wrong result: relative error {errors[0]:.2e}, eager PyTorch has {errors[1]:.2e}")
        print(
            f"bfloat16, {shape[0]} x {shape[1]}, CPU: error {errors[0]:.1e} (eager PyTorch {errors[1]:.1e}), "
            f"{seconds[0] * 1e6:.0f} us, {seconds[1] / seconds[0]:.1f} times as fast as eager"
        )


def run(title: str, *command: str | Path, environment: Mapping[str, str] = os.environ) -> None:
    """Print and run a command, which reports its own errors; end with its status if it fails."""
    print(f"\n{title}\n  {shlex.join(map(str, command))}", flush=True)
    if status := subprocess.run(command, check=False, env=dict(environment)).returncode:
        sys.exit(status)


def variants_of_today() -> list[str]:
    """Return the names of the variants for this machine's CPU and the newest CUDA."""
    command: list[str | Path] = [BUILDER, "list-variants", PROJECT, "--arch", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [row for row in json.loads(done.stdout) if row["buildable"]]
    newest = max((row["cuda"] for row in rows if row["cuda"]), key=Version, default=None)
    return [row["variant"] for row in rows if row["backend"] == "cpu" or (newest and row["cuda"] == newest)]


def main() -> None:
    """Build, upload, load, check and time."""
    started = time.perf_counter()
    chosen = [argument for name in variants_of_today() for argument in ("--variant", name)]
    run("1. Build for the CPU and the newest CUDA", BUILDER, "build", PROJECT, *chosen)
    with tempfile.TemporaryDirectory() as directory:
        serve = [BUILDER, "hub", "serve", "--root", f"{directory}/hub", "--port", "0"]
        serve += ["--trust", "kernels-community", "--json"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            if not (ready := server.stdout.readline()):
                raise SystemExit("the Hub server did not start: run `kernel-builder hub serve` to see its error")
            try:
                environment = {**os.environ, "HF_ENDPOINT": json.loads(ready)["url"], "HF_TOKEN": "any"}
                environment |= {"HF_HOME": f"{directory}/home", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
                environment.pop("HF_HUB_OFFLINE", None)
                upload = [BUILDER, "upload", PROJECT, "--repo-id", REPOSITORY, "--no-load"]
                run("2. Upload to a Hub server on this machine", *upload, environment=environment)
                check = [sys.executable, __file__, "--check"]
                run("3. Load from there, as any user does, check and time", *check, environment=environment)
            finally:
                server.terminate()
    print(f"\nIn all {time.perf_counter() - started:.0f} s.\n{NEXT}")


if __name__ == "__main__":
    if "--check" in sys.argv:
        check_and_time()
    else:
        main()
