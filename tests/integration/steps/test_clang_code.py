"""The code that clang makes of kernels: loads do not wait for one another, and registers are not spilled."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.backends.cuda.commands import CLANG_DEVICE_FLAGS
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.support.places import ROOT

# Eight loads of 16 bytes, each under a condition of its own.
LOADS = """\
#include "kit/elements.cuh"
__global__ void k(const __nv_bfloat16* from, float* to, int rows) {
  kit::Vector<__nv_bfloat16, 8> vectors[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    vectors[i] = {};
    if (threadIdx.x + i < rows) vectors[i] = kit::load<__nv_bfloat16, 8>(from + (threadIdx.x + i) * 8);
  }
  float sum = 0.0f;
#pragma unroll
  for (const auto& vector : vectors) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += kit::decode(vector, j) * kit::decode(vector, j);
  }
  to[threadIdx.x] = sum;
}
"""


def compile_device(source: Path, include: Path, *options: str | Path) -> str:
    """Compile for 9.0 as the builder does, and return the compiler's output."""
    tools = Toolchains()
    toolkit = toolkits.toolkit(tools, Release(12, 6))
    assert toolkit.clang is not None
    command = [
        toolkit.clang.root / "zig",
        "clang",
        "--target=x86_64-linux-gnu",
        "-x",
        "cuda",
        source,
        f"-I{include}",
    ]
    command += [f"-resource-dir={toolkit.clang.root}", f"--cuda-path={toolkit.root}"]
    command += [f"--gcc-install-dir={tools.host().install}", "--offload-arch=sm_90", "--cuda-device-only"]
    command += ["-std=c++17", "-O3", "-DNDEBUG", *CLANG_DEVICE_FLAGS, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_loaded_vectors_stay_in_words(tmp_path: Path) -> None:
    """No 16-bit element is taken from a word where it is loaded."""
    source, ptx = tmp_path / "loads.cu", tmp_path / "loads.ptx"
    source.write_text(LOADS)
    compile_device(source, ROOT / "kernels", "-S", "-o", ptx)
    assert len(re.findall(r"ld[.]global[.\w]*[.]v4[.]\w+", ptx.read_text())) == 8
    assert "%rs" not in ptx.read_text()


def test_fast_kernels_do_not_spill(tmp_path: Path) -> None:
    """Without the builder's options, some of these kernels do."""
    project = ROOT / "kernels" / "adaln"
    output = compile_device(
        project / "adaln_cuda" / "forward.cu", project, "-c", "-o", tmp_path / "cubin", "-Xcuda-ptxas", "-v"
    )
    stores = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes spill stores", output)
    fast = {name: int(count) for name, count in stores if "forward_general_kernel" not in name}
    assert len(fast) > 10
    assert set(fast.values()) == {0}
