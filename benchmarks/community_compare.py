"""Compares this builder's binaries of public kernels with torch.utils.cpp_extension's, in device time, on a GPU.

    python benchmarks/community_compare.py kernels-community --packages community-build --json compare.json

Both binaries are of the same sources. `cpp_extension` compiles on this machine, with its nvcc, for its GPU. The script
needs Torch with nvcc and the public `kernels` client, and not the builder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
import torch

_ROUNDS = 15
_REGISTRATION = Path(__file__).resolve().parent.parent / "kernel_builder" / "templates" / "registration.h"
_SOURCES = {".cu", ".cpp", ".cc", ".cxx"}


def _cases() -> dict[str, dict[str, Callable[[Any], Callable[[], None]]]]:
    """Return project -> name of a case -> function that prepares a call of the project's ops."""

    def relu(rows: int) -> Callable[[Any], Callable[[], None]]:
        source = torch.randn(rows, 4096, device="cuda")
        out = torch.empty_like(source)
        return lambda ops: lambda: ops.relu(out, source)

    def rotary(tokens: int) -> Callable[[Any], Callable[[], None]]:
        first, second = (torch.randn(1, tokens, 32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cos, sin = (torch.randn(tokens, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        outs = torch.empty_like(first), torch.empty_like(second)
        return lambda ops: lambda: ops.apply_rotary(first, second, cos, sin, *outs, False)

    def activation(name: str, rows: int) -> Callable[[Any], Callable[[], None]]:
        source = torch.randn(rows, 2 * 11008, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, 11008, device="cuda", dtype=torch.bfloat16)
        return lambda ops: lambda: getattr(ops, name)(out, source)

    return {
        "relu": {f"relu {rows}x4096 float32": relu(rows) for rows in (1024, 16384)},
        "rotary": {f"apply_rotary {tokens}x32x128 bfloat16": rotary(tokens) for tokens in (1024, 16384)},
        "activation": {
            f"{name} {rows}x11008 bfloat16": activation(name, rows)
            for name in ("silu_and_mul", "gelu_tanh_and_mul")
            for rows in (1024, 8192)
        },
    }


def _build(root: Path, directory: str) -> Any:
    """Build a project's CUDA binary with `cpp_extension` and return its ops."""
    from torch.utils import cpp_extension

    config = tomllib.loads((root / "build.toml").read_text())
    kernels = [kernel for kernel in config["kernel"].values() if kernel["backend"] == "cuda"]
    named = [*config["torch"]["src"], *(source for kernel in kernels for source in kernel["src"])]
    (Path(directory) / "registration.h").write_text(_REGISTRATION.read_text())
    flags = ["-O3", "-DCUDA_KERNEL"]
    extended = ["--expt-relaxed-constexpr", "--expt-extended-lambda"]  # as both builders set them
    stable = config["torch"].get("stable-abi", {}).get("cuda")
    if stable:
        major, minor = map(int, stable.split("."))
        flags += [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}", "-DUSE_CUDA"]
    name = f"{root.name}_torch_extension"
    cpp_extension.load(
        name,
        [str(root / source) for source in named if Path(source).suffix in _SOURCES],
        extra_cflags=flags,
        extra_cuda_cflags=[*flags, *extended, *(flag for kernel in kernels for flag in kernel.get("cuda-flags", ()))],
        extra_include_paths=[directory, str(root), str(root / "torch-ext")],
        build_directory=directory,
        is_python_module=False,
    )
    return getattr(torch.ops, name)


def _ours(packages: Path) -> Any:
    """Load this builder's CUDA package and return its ops."""
    from kernels import get_local_kernel

    package = next(path for path in sorted(packages.iterdir()) if "-cu" in path.name)
    get_local_kernel(package, backend="cuda", trust_remote_code=True)
    return getattr(torch.ops, json.loads((package / "metadata.json").read_text())["id"])


def _time(call: Callable[[], None]) -> float:
    """Return the median device time of a call in microseconds, with a cold L2 cache."""
    from triton.testing import do_bench

    return 1000 * float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def main() -> None:
    """Time every case with both binaries in turn, and write the median of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="The repository of kernel projects.")
    parser.add_argument("--packages", type=Path, required=True, help="PACKAGES/<project>/<variant>/ are packages.")
    parser.add_argument("--json", type=Path, required=True, help="Write the results to this file.")
    arguments = parser.parse_args()
    torch.cuda.init()
    rows = []
    for project, cases in _cases().items():
        with tempfile.TemporaryDirectory() as directory:
            theirs = _build((arguments.directory / project).resolve(), directory)
        ours = _ours((arguments.packages / project).resolve())
        for name, prepare in cases.items():
            calls = prepare(ours), prepare(theirs)
            times = [tuple(_time(call) for call in calls) for _ in range(_ROUNDS)]
            row = {
                "project": project,
                "case": name,
                "microseconds": statistics.median(mine for mine, _ in times),
                "ratio": statistics.median(mine / other for mine, other in times),
            }
            rows.append(row)
            print(row, flush=True)
            arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
