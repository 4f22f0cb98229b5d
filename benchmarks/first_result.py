"""Measures the time to the first result of one source: `kernel_builder.load` beside `cpp_extension.load_inline`.

    .venv/bin/python benchmarks/first_result.py
    .venv/bin/python benchmarks/first_result.py --cuda

Each run is a new process that imports Torch before the clock starts, with caches that have no compiled object and no
compiler cache. The toolchain of `load` is fetched once before. Both take turns. `--cuda` compiles for one GPU and loads
nothing, so that a machine without CUDA can measure it; load_inline gets the CUDA compiler that `load` uses.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains

CUDA = Release(13, 0)
CAPABILITY = "9.0"
KERNEL = """
__global__ void scale_kernel(const float* x, float* y, float factor, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) y[i] = factor * x[i];
}
"""
ON_CUDA = """
  scale_kernel<<<(x.numel() + 255) / 256, 256>>>(
      x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), factor, x.numel());
"""
ON_CPU = """
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  %s::parallel_for(0, x.numel(), 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = static_cast<float>(factor) * from[i];
  });
"""


def source(on_cuda: bool, tensor: str, namespace: str) -> str:
    """Return the source with the names of the stable ABI, or those of `at::`."""
    body = ON_CUDA if on_cuda else ON_CPU % ("torch::stable" if tensor == "Tensor" else "at")
    function = (
        f"{tensor} scale(const {tensor}& x, double factor) {{ {tensor} y = {namespace}empty_like(x);{body}return y; }}"
    )
    return (KERNEL if on_cuda else "") + function


def ours(on_cuda: bool) -> Callable[[], Any]:
    import kernel_builder
    from kernel_builder.develop import inline, local_build

    text = source(on_cuda, "Tensor", "")
    if not on_cuda:
        return lambda: kernel_builder.load(text, "scale")
    # As on a machine with this GPU and Torch for this CUDA.
    inline._capabilities = lambda backend: (CAPABILITY,)  # type: ignore[assignment]
    local_build.loadable = lambda variants: [variant for variant in variants if variant.release == CUDA]

    def compile_only() -> None:
        with suppress(FileNotFoundError, ValueError):  # nothing to load where Torch has no CUDA
            kernel_builder.load(text, "scale")

    return compile_only


def theirs(on_cuda: bool) -> Callable[[], Any]:
    from torch.utils import cpp_extension

    text = source(on_cuda, "at::Tensor", "at::")
    if not on_cuda:
        return lambda: cpp_extension.load_inline("scale_inline", text, functions=["scale"], extra_cflags=["-O3"]).scale

    stubs = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "stubs"
    stubs.mkdir(parents=True)
    for name in ("c10_cuda", "torch_cuda", "cudart"):  # a Torch without CUDA lacks the libraries that are linked
        command = ["g++", "-shared", "-x", "c++", os.devnull, "-o", str(stubs / f"lib{name}.so")]
        subprocess.run(command, check=True)
    cpp_extension.CUDA_HOME = str(Toolchains().cuda(CUDA).root)
    cpp_extension._import_module_from_library = lambda *arguments: None
    os.environ["TORCH_CUDA_ARCH_LIST"] = CAPABILITY
    return lambda: cpp_extension.load_inline(
        "scale_inline",
        "at::Tensor scale(const at::Tensor& x, double factor);",
        text,
        functions=["scale"],
        with_cuda=True,
        extra_cuda_cflags=["-O3"],
        extra_ldflags=[f"-L{stubs}"],
    )


def once(which: str, on_cuda: bool) -> None:
    """Print the seconds of one first result, and those of processor time, its compilers included."""
    import torch

    function = {"ours": ours, "theirs": theirs}[which](on_cuda)
    started, before = time.perf_counter(), processor_seconds()
    scale = function()
    if not on_cuda:
        assert torch.equal(scale(torch.ones(3), 2.0), torch.full((3,), 2.0))
    print(json.dumps([time.perf_counter() - started, processor_seconds() - before]))


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(which: str, on_cuda: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        cache.mkdir()
        (cache / "toolchains").symlink_to(Toolchains().store.root, target_is_directory=True)
        fresh = {"KERNEL_BUILDER_CACHE": str(cache), "SCCACHE_DIR": f"{directory}/sccache"}
        fresh |= {"TORCH_EXTENSIONS_DIR": f"{directory}/torch", "TORCH_NO_COMPILER_WRAPPER": "1"}
        command = [sys.executable, __file__, which, *(["--cuda"] if on_cuda else [])]
        done = subprocess.run(command, env={**os.environ, **fresh}, check=True, stdout=subprocess.PIPE, text=True)
        seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
        return seconds


def main() -> None:
    on_cuda = "--cuda" in sys.argv
    if chosen := {"ours", "theirs"}.intersection(sys.argv):
        once(chosen.pop(), on_cuda)
        return
    measure("ours", on_cuda)  # fetches the toolchain
    rounds = [(measure("ours", on_cuda), measure("theirs", on_cuda)) for _ in range(3)]
    for index, name in enumerate(("seconds", "seconds of processor time")):
        mine, other = (statistics.median(pair[who][index] for pair in rounds) for who in (0, 1))
        print(f"{name}: load {mine:.1f}, load_inline {other:.1f}, ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
