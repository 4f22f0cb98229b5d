"""`build --resources` says what each kernel takes of the GPU, as the compilers report it, and changes no package."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.integration.build_command.conftest import BUILDER, Copy, Run, environment, replace
from tests.support.places import CUDA

CUDA12 = CUDA.replace("cu130", "cu126")
# 65536 registers for 2048 threads: 32 for each, which the values that it keeps in between exceed.
SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling(float* out, const float* in) {
  __shared__ float row[1024];
  float kept[64];
#pragma unroll
  for (int i = 0; i < 64; i++) kept[i] = in[i * 1024 + threadIdx.x];
  row[threadIdx.x] = kept[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) out[i * 1024 + threadIdx.x] = kept[i] * row[(threadIdx.x + i) % 1024] + kept[63 - i];
}
"""


def test_the_compilers_report_is_that_of_each_kernel(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("stable-scale")
    source = project / "scale" / "scale_cuda.cu"
    source.write_text(source.read_text() + SPILLING)
    replace(project / "build.toml", '["9.0"]', '["8.6", "9.0"]')
    arguments = ("build", project, "--variant", CUDA, "--variant", CUDA12, "--no-load")
    done = kernel_builder(cache, *arguments, "--resources")
    assert done.code == 0, done
    plain = kernel_builder(cache, *arguments)
    assert {package["status"] for package in plain.answer["packages"]} == {"unchanged"} and not plain.answer[
        "resources"
    ]
    sources = done.answer["resources"]
    assert sorted(entry["variants"] for entry in sources) == [[CUDA12], [CUDA]]
    for entry in sources:
        figures = {(kernel["kernel"].split("(")[0], kernel["capability"]): kernel for kernel in entry["kernels"]}
        assert len(figures) == 4
        spilling = figures["spilling", "9.0"]
        assert spilling["registers"] == 32 and spilling["shared"] == 4096
        assert spilling["spill-stores"] > 0 < spilling["spill-loads"] and spilling["stack"] > 0
        assert set(spilling["occupancy"].values()) == {1.0}
        other = next(
            kernel for (_, capability), kernel in figures.items() if capability == "8.6" and not kernel["shared"]
        )
        assert other["spill-loads"] == other["stack"] == 0 < other["registers"]
        assert other["occupancy"]["1024"] == 0.6667, "48 warps"
    command = [BUILDER, *map(str, arguments[:4]), "--no-load", "--resources"]
    printed = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=True).stdout
    (row,) = [line for line in printed.splitlines() if " spilling(float*, float const*)" in line and " 9.0 " in line]
    assert row.split()[:2] == ["9.0", "32"] and " 4096 B " in row and "100%" in row
