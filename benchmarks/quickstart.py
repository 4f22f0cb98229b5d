"""Build kernels/rmsnorm for every variant of this platform, publish it to a Hub of one's own, load it from there as
anyone would, check it and time it.

make quickstart
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "kernels" / "rmsnorm"
BUILDER = Path(sys.executable).with_name("kernel-builder")


def check_and_time() -> None:
    """Runs in a process of its own: load with the public client, compare with float64, time against eager PyTorch."""
    import torch
    from kernels import get_kernel
    from torch.utils.benchmark import Timer

    kernel = get_kernel("kernels-community/rmsnorm", version=1, backend="cpu")
    result: dict[str, object] = {"module": kernel.__name__, "torch": torch.__version__, "shapes": []}

    def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        variance = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + 1e-6) * weight.float()).to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        for rows, hidden in ((512, 4096), (4096, 1024)):
            generator = torch.Generator().manual_seed(rows + hidden)
            x = torch.randn(rows, hidden, generator=generator).to(dtype)
            weight = torch.randn(hidden, generator=generator).to(dtype)
            exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
            scale = exact.norm()
            error = float((kernel.rms_norm(x, weight).double() - exact).norm() / scale)
            eager_error = float((eager(x, weight).double() - exact).norm() / scale)
            if not error <= eager_error * 1.1:
                raise SystemExit(f"wrong result: relative error {error:.2e}, eager has {eager_error:.2e}")
            names = {"kernel": kernel, "eager": eager, "x": x, "weight": weight}
            ours = Timer("kernel.rms_norm(x, weight)", globals=names, num_threads=torch.get_num_threads())
            theirs = Timer("eager(x, weight)", globals=names, num_threads=torch.get_num_threads())
            seconds = ours.blocked_autorange(min_run_time=0.3).median
            eager_seconds = theirs.blocked_autorange(min_run_time=0.3).median
            result["shapes"].append(  # type: ignore[attr-defined]
                {
                    "shape": f"{rows} x {hidden}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "error": error,
                    "eager_error": eager_error,
                    "microseconds": seconds * 1e6,
                    "speedup": eager_seconds / seconds,
                }
            )
    print(json.dumps(result))


@contextmanager
def own_hub() -> Iterator[dict[str, str]]:
    """The environment that points the public clients to a Hub of this machine's own, which runs in the meantime."""
    with tempfile.TemporaryDirectory() as directory:
        command = [BUILDER, "hub", "serve", "--root", f"{directory}/hub", "--trust", "kernels-community", "--json"]
        with Path(directory, "log").open("w+") as log:
            hub = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                assert hub.stdout is not None
                ready = hub.stdout.readline()
                if not ready:
                    raise SystemExit("the Hub did not start:\n" + Path(log.name).read_text())
                endpoint = json.loads(ready)["url"]
                kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
                yield {
                    **kept,
                    "HF_ENDPOINT": endpoint,
                    "HF_HOME": f"{directory}/home",
                    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                    "HF_TOKEN": "any",  # writes to a Hub without tokens, which only this machine reaches
                }
            finally:
                hub.terminate()
                hub.wait()


def answer_of(command: list[str | Path], environment: dict[str, str], failed: str) -> dict[str, Any]:
    """What a command answers as JSON; ends with its words where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode:
        words = [answer.get(key) for key in ("where", "message", "output", "hint")]
        raise SystemExit(f"{failed}:\n" + "\n".join(word for word in words if word))
    return answer


def main() -> None:
    """Build, publish and load, then print two small tables."""
    from rich.console import Console
    from rich.table import Column, Table

    summary = answer_of([BUILDER, "build", PROJECT, "--json"], dict(os.environ), "the build failed")
    with own_hub() as environment:
        upload: list[str | Path] = [
            BUILDER,
            "upload",
            PROJECT,
            "--repo-id",
            "kernels-community/rmsnorm",
            "--no-load",
            "--json",
        ]
        published = answer_of(upload, environment, "the publication failed")
        checked = answer_of([sys.executable, __file__, "--check"], environment, "the kernel could not be loaded")

    console = Console()
    table = Table(Column("variant", no_wrap=True), "size", "checks", title="kernels/rmsnorm/build")
    for package in summary["packages"]:
        checks = package["checks"]
        said = f"{len(checks['passed'])} passed, {len(checks['skipped'])} skipped" if checks else "passed before"
        table.add_row(package["variant"], f"{package['bytes'] / 1024:.0f} KiB", said)
    elsewhere = [missing["variant"] for missing in summary["unavailable"]]
    console.print(table)
    if elsewhere:
        console.print(f"not built on this machine: {', '.join(elsewhere)}")
        console.print("(.venv/bin/kernel-builder list-variants kernels/rmsnorm says why, and what to do)\n")

    sent = published["builds"]
    console.print(f"published to {published['url']}: {len(sent['sent'])} files, {sent['bytes'] / 2**20:.1f} MiB\n")

    title = f'get_kernel("kernels-community/rmsnorm", version=1) over HTTP, Torch {checked["torch"]}, on the CPU'
    table = Table("rms_norm", "dtype", "error", "eager's error", "time", "speed", title=title)
    for row in checked["shapes"]:
        table.add_row(
            row["shape"],
            row["dtype"],
            f"{row['error']:.1e}",
            f"{row['eager_error']:.1e}",
            f"{row['microseconds']:.0f} us",
            f"{row['speedup']:.1f} x eager",
        )
    console.print(table)
    console.print(
        f"{summary['compiles']} files compiled, {summary['seconds']:.0f} s in all. "
        "Now: .venv/bin/kernel-builder init --name you/my-kernel"
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        check_and_time()
    else:
        main()
