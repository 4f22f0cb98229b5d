"""`make quickstart`: takes kernels/rmsnorm from its sources to `get_kernel`, and prints each command on the way.

Builds the variants of the CPU and of the newest CUDA, which today's Torch loads, uploads them to a Hub server that runs
in the meantime, loads the kernel from there with the public client, compares it with a float64 reference, and times it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "kernels" / "rmsnorm"
REPOSITORY = "kernels-community/rmsnorm"
BUILDER = Path(sys.executable).with_name("kernel-builder")
SHAPES = ((512, 4096), (4096, 1024))

NEXT = """
Next
  .venv/bin/kernel-builder init you/my-kernel          # a new project that builds, tests and benchmarks as it is
  .venv/bin/kernel-builder build my-kernel             # my-kernel/build/<variant>/
  .venv/bin/kernel-builder check-builds my-kernel      # the checks that the Hub and older machines need
  .venv/bin/kernel-builder benchmark my-kernel         # correctness, and speed compared with PyTorch
  .venv/bin/kernel-builder upload my-kernel            # to huggingface.co, or to the server in HF_ENDPOINT

README.md and docs/build-toml.md continue from here."""


def check_and_time() -> None:
    """Load the kernel, compare it with float64, time it, and print one JSON object. Runs in a process of its own."""
    import torch
    from kernels import get_kernel

    started = time.perf_counter()
    kernel = get_kernel(REPOSITORY, version=1, backend="cpu")
    load_seconds = time.perf_counter() - started
    rows = [
        check_and_time_shape(kernel, rows, hidden, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for rows, hidden in SHAPES
    ]
    print(json.dumps({"torch": torch.__version__, "load_seconds": load_seconds, "rows": rows}))


def check_and_time_shape(kernel: Any, rows: int, hidden: int, dtype: Any) -> dict[str, Any]:
    """Return relative errors and times of the kernel and of eager PyTorch; exits if the kernel is less accurate."""
    import torch
    from torch.utils.benchmark import Timer

    def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        variance = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + 1e-6) * weight.float()).to(x.dtype)

    generator = torch.Generator().manual_seed(rows + hidden)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    scale = exact.norm()
    error = float((kernel.rms_norm(x, weight).double() - exact).norm() / scale)
    eager_error = float((eager(x, weight).double() - exact).norm() / scale)
    if not error <= eager_error * 1.1:
        raise SystemExit(f"wrong result: relative error {error:.2e}, eager PyTorch has {eager_error:.2e}")

    def seconds(statement: str) -> float:
        names = {"kernel": kernel, "eager": eager, "x": x, "weight": weight}
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.3).median)

    return {
        "shape": f"{rows} x {hidden}",
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "eager_error": eager_error,
        "seconds": seconds("kernel.rms_norm(x, weight)"),
        "eager_seconds": seconds("eager(x, weight)"),
    }


def run_json(command: list[str | Path], environment: Mapping[str, str], failed: str) -> tuple[dict[str, Any], float]:
    """Run a command that prints one JSON object; return the object and the wall time in seconds.

    Raises:
        SystemExit: If the command fails; with the message of its JSON.
    """
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=dict(environment))
    result: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode:
        parts = [result.get(key) for key in ("where", "message", "output", "hint")]
        raise SystemExit(f"{failed}:\n" + "\n".join(part for part in parts if part))
    return result, time.perf_counter() - started


@contextmanager
def running_hub(directory: Path) -> Iterator[str]:
    """Run a Hub server on `directory` in the context, and return its URL.

    Raises:
        SystemExit: If it does not start.
    """
    command = [BUILDER, "hub", "serve", "--root", directory, "--port", "0", "--trust", "kernels-community", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        if not (ready := server.stdout.readline()):
            raise SystemExit("the Hub server did not start: run `kernel-builder hub serve` to see its error")
        try:
            yield str(json.loads(ready)["url"])
        finally:
            server.terminate()


def variants_of_today() -> list[str]:
    """Return the names of the variants for this machine's CPU and the newest CUDA."""
    command: list[str | Path] = [BUILDER, "list-variants", PROJECT, "--arch", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [row for row in json.loads(done.stdout) if row["buildable"]]
    newest = max((row["cuda"] for row in rows if row["cuda"]), key=Version, default=None)
    return [row["variant"] for row in rows if row["backend"] == "cpu" or (newest and row["cuda"] == newest)]


def print_heading(console: Console, title: str, *commands: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    for command in commands:
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()  # before the progress that the command writes to stderr


def print_build(console: Console, summary: Mapping[str, Any]) -> None:
    table = Table(Column("variant", no_wrap=True), "size", "checks")
    for package in summary["packages"]:
        outcome = f"{len(package['passed-checks'])} passed"
        outcome += ", load skipped" if "load" in package["skipped-checks"] else ""
        table.add_row(package["variant"], f"{package['bytes'] / 1024:.0f} KiB", outcome)
    console.print(table)
    lines = [
        f"{len(summary['packages'])} variants in kernels/rmsnorm/build/: {summary['compiles']} files compiled, "
        f"{summary['seconds']:.0f} s. A stable-ABI binary serves every Torch from 2.10 on."
    ]
    if elsewhere := [missing["variant"] for missing in summary["unavailable"]]:
        lines.append(f"Not built on this machine: {', '.join(elsewhere)}")
        lines.append("(.venv/bin/kernel-builder list-variants kernels/rmsnorm shows the reasons)")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def print_timings(console: Console, checked: Mapping[str, Any]) -> None:
    table = Table(Column("shape", no_wrap=True), "dtype", "error", "eager's error", "time", "speedup")
    for row in checked["rows"]:
        table.add_row(
            row["shape"],
            row["dtype"],
            f"{row['error']:.1e}",
            f"{row['eager_error']:.1e}",
            f"{row['seconds'] * 1e6:.0f} us",
            f"{row['eager_seconds'] / row['seconds']:.1f} x eager",
        )
    console.print(table)
    console.print(
        f"Loaded over HTTP in {checked['load_seconds']:.1f} s. Torch {checked['torch']}, on the CPU; errors are "
        "relative to float64, eager is the same formula in PyTorch.",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """Build, upload, load, check and time, with a heading and a result for each."""
    console = Console()
    started = time.perf_counter()
    chosen = [argument for name in variants_of_today() for argument in ("--variant", name)]
    print_heading(
        console,
        "1. Build for the CPU and the newest CUDA. Without --variant, every variant for this machine is built",
        " ".join(["kernel-builder build kernels/rmsnorm", *chosen]),
    )
    build: list[str | Path] = [BUILDER, "build", PROJECT, *chosen, "--json"]
    summary, build_seconds = run_json(build, os.environ, "the build failed")
    print_build(console, summary)

    with tempfile.TemporaryDirectory() as directory, running_hub(Path(directory, "hub")) as url:
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": "any", "HF_HOME": f"{directory}/home"}
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        environment.pop("HF_HUB_OFFLINE", None)
        print_heading(
            console,
            "2. Upload to a Hub server, which runs until this program ends",
            "kernel-builder hub serve --root DIRECTORY --trust kernels-community",
            f"HF_ENDPOINT={url} kernel-builder upload kernels/rmsnorm --repo-id {REPOSITORY}",
        )
        upload: list[str | Path] = [BUILDER, "upload", PROJECT, "--repo-id", REPOSITORY, "--no-load", "--json"]
        uploaded, upload_seconds = run_json(upload, environment, "the upload failed")
        builds = uploaded["builds"]
        console.print(f"{len(builds['sent'])} files, {builds['bytes'] / 2**20:.1f} MiB, {upload_seconds:.0f} s")

        print_heading(
            console,
            "3. Load from there, as any user does, check and time",
            f'get_kernel("{REPOSITORY}", version=1).rms_norm(x, weight)',
        )
        check: list[str | Path] = [sys.executable, __file__, "--check"]
        checked, check_seconds = run_json(check, environment, "the check failed")
        print_timings(console, checked)

    print(
        f"\nIn all {time.perf_counter() - started:.0f} s: build {build_seconds:.0f} s, upload {upload_seconds:.0f} s, "
        f"load, check and time {check_seconds:.0f} s."
    )
    print(NEXT)


if __name__ == "__main__":
    if "--check" in sys.argv:
        check_and_time()
    else:
        main()
