"""Measures the time to the first result of one C++ source: `kernel_builder.load` beside `cpp_extension.load_inline`.

    .venv/bin/python benchmarks/first_result.py

Each run is a new process that imports Torch before the clock starts, with caches that have no compiled object. Neither
uses a compiler cache. The toolchain of `load` is fetched once before. Both take turns.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = """
TENSOR scale(const TENSOR& x, double factor) {
  TENSOR y = NAMESPACE::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  NAMESPACE::parallel_for(0, x.numel(), 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(factor) * from[i];
  });
  return y;
}
"""


def ours() -> Any:
    import kernel_builder

    return kernel_builder.load(SOURCE.replace("TENSOR", "Tensor").replace("NAMESPACE", "torch::stable"), "scale")


def theirs() -> Any:
    from torch.utils import cpp_extension

    source = SOURCE.replace("TENSOR", "at::Tensor").replace("NAMESPACE", "at")
    return cpp_extension.load_inline("scale_inline", source, functions=["scale"], extra_cflags=["-O3"]).scale


def once(which: str) -> None:
    """Print the seconds of one first result, and those of processor time, its compilers included."""
    import torch

    started, before = time.perf_counter(), processor_seconds()
    scale = {"ours": ours, "theirs": theirs}[which]()
    assert torch.equal(scale(torch.ones(3), 2.0), torch.full((3,), 2.0))
    print(json.dumps([time.perf_counter() - started, processor_seconds() - before]))


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(which: str) -> list[float]:
    """Run `once` in a new process with caches of its own, which share the downloaded toolchains."""
    from kernel_builder.toolchain import Toolchains

    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        cache.mkdir()
        (cache / "toolchains").symlink_to(Toolchains().store.root, target_is_directory=True)
        fresh = {"KERNEL_BUILDER_CACHE": str(cache), "TORCH_EXTENSIONS_DIR": f"{directory}/torch"}
        fresh["TORCH_NO_COMPILER_WRAPPER"] = "1"
        command = [sys.executable, __file__, which]
        done = subprocess.run(command, env={**os.environ, **fresh}, check=True, stdout=subprocess.PIPE, text=True)
        seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
        return seconds


def main() -> None:
    if len(sys.argv) > 1:
        once(sys.argv[1])
        return
    measure("ours")  # fetches the toolchain
    rounds = [(measure("ours"), measure("theirs")) for _ in range(3)]
    for index, name in enumerate(("seconds", "seconds of processor time")):
        mine, other = (statistics.median(pair[who][index] for pair in rounds) for who in (0, 1))
        print(f"{name}: load {mine:.1f}, load_inline {other:.1f}, ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
