"""The code that clang makes of kernels: registers are not spilled."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.backends.cuda.releases import data
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.support.places import ROOT


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
    command += ["-std=c++17", "-O3", "-DNDEBUG", *data()["clang"]["device-flags"], *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


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
