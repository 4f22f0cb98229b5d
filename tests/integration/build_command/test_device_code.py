"""The device code of `kernels/` compiles without a warning for every capability: `make device-code`, some minutes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
import torch

from kernel_builder.backends.cuda import toolkits
from kernel_builder.backends.cuda.releases import DATA, KNOWN_CAPABILITIES
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.support.cli import expect
from tests.support.places import ROOT, SOURCES

FAST = sorted(ROOT.glob("kernels/*/*_cuda/*.cu"))
NAIVE = sorted(ROOT.glob("kernels/*/naive/*.cu"))
NAIVE_PROJECTS = [source.parent for source in NAIVE]


def each(sources: Sequence[Path]) -> pytest.MarkDecorator:
    names = [str(path.relative_to(ROOT / "kernels")) for path in sources]
    return pytest.mark.parametrize("source", sources, ids=names)


def output_of(command: Sequence[str | Path], source: Path, output: Path) -> str:
    """Compile with the project's root as include directory, and return the compiler's messages."""
    flags: list[str | Path] = [f"-I{source.parent.parent}"]
    if source.parent.name == "naive":  # its file includes its binding
        flags = [f"-I{source.parent}", "-DCUDA_KERNEL", "-DUSE_CUDA", "-DTORCH_EXTENSION_NAME=naive", "-isystem"]
        flags += [Path(torch.__file__).parent / "include", "-isystem", ROOT / "kernel_builder/templates"]
    command = [*command, "-std=c++17", "-O3", "-DNDEBUG", *flags, "-c", source, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def compiles(command: Sequence[str | Path], source: Path, output: Path) -> None:
    """Compile without a warning."""
    assert output_of(command, source, output) == ""


def clang(tools: Toolchains) -> list[str | Path]:
    """Return clang's command for CUDA 12, without a capability."""
    toolkit = toolkits.toolkit(tools, Release(12, 6))
    assert toolkit.clang is not None
    places = [f"-resource-dir={toolkit.clang.root}", f"--cuda-path={toolkit.root}"]
    gxx = f"--gcc-install-dir={tools.host().install}"
    return [toolkit.clang.root / "zig", "clang", "--target=x86_64-linux-gnu", "-x", "cuda", *places, gxx]


@pytest.mark.device_code
@each(FAST + NAIVE)
def test_clang(source: Path, tmp_path: Path) -> None:
    tools = Toolchains()
    known = KNOWN_CAPABILITIES  # CUDA 12 has older ones, which the kernels are not written for
    capabilities = [capability for capability in known[Release(12, 8)] if capability in known[Release(13, 0)]]
    targets = [f"--offload-arch=sm_{capability.replace('.', '')}" for capability in capabilities]
    compiles([*clang(tools), *targets, "-Wall", "-Wextra", "-Werror"], source, tmp_path / "object")


@pytest.mark.device_code
@each(FAST)
def test_clang_keeps_arrays_in_registers(source: Path, tmp_path: Path) -> None:
    """No element is chosen by its address, and no copy of floats is split into bytes."""
    ptx = tmp_path / "ptx"
    without_c = "-Wno-unused-command-line-argument"  # -S goes before it
    compiles([*clang(Toolchains()), "--offload-arch=sm_90", "--cuda-device-only", "-S", without_c], source, ptx)
    assert re.findall(r"(?:ld|st)\.local.*|st\.\w+\.b8 .*%r\d+;", ptx.read_text()) == []


@pytest.mark.device_code
@each(FAST + NAIVE)
@pytest.mark.parametrize("release", [Release(13, 0), Release(13, 2)], ids=str)
def test_nvcc(source: Path, release: Release, tmp_path: Path) -> None:
    toolkit = toolkits.toolkit(Toolchains(), release)
    codes = [f"{major}{minor}" for major, minor in (str(known).split(".") for known in KNOWN_CAPABILITIES[release])]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    warnings = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"]
    assert toolkit.nvcc is not None
    compiles([toolkit.nvcc, *targets, *warnings, "--expt-relaxed-constexpr"], source, tmp_path / "object")


@pytest.mark.device_code
def test_fast_kernels_do_not_spill(tmp_path: Path) -> None:
    """Registers of clang's code; without the builder's options, some of these kernels spill them."""
    target = ["--offload-arch=sm_90", "--cuda-device-only", *DATA["clang"]["device-flags"], "-Xcuda-ptxas", "-v"]
    source = ROOT / "kernels/adaln/adaln_cuda/forward.cu"
    messages = output_of([*clang(Toolchains()), *target], source, tmp_path / "cubin")
    stores = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes spill stores", messages)
    fast = {name: int(count) for name, count in stores if "forward_general_kernel" not in name}
    assert len(fast) > 10 and set(fast.values()) == {0}


def test_every_kernel_has_a_naive_kernel_in_one_short_file() -> None:
    """`kernel-builder benchmark` compares them with float64 at every shape that is measured."""
    # The kernel of `loss` is one step between products of matrices; its problem.h has the formula.
    kernels = {path.parent for path in ROOT.glob("kernels/*/*_cuda")} - {ROOT / "kernels" / "loss"}
    assert {project.parent for project in NAIVE_PROJECTS} == kernels
    for project in NAIVE_PROJECTS:
        (source,) = project.glob("*.cu")
        assert source.stem == project.parent.name
        assert len(source.read_text().splitlines()) <= 120
    expect(0, "", "check-config", *NAIVE_PROJECTS)


PTX = SOURCES["ptx"]
# As clang writes it -> as ptxas gets it. None is unchanged.
STORES = json.loads(Path(__file__).with_name("stores.json").read_text())


def test_stores_of_low_bytes_get_an_integer(tmp_path: Path) -> None:
    """ptxas would store an integer conversion in place of the low bytes of a float. It accepts the corrected PTX."""
    script = tmp_path / "ptxas"
    script.write_text((resources.files("kernel_builder") / "templates/clang/ptxas").read_text())
    source = tmp_path / "kernel.s"
    source.write_text(PTX.replace("BODY", "\n".join(STORES)))
    ptxas = toolkits.toolkit(Toolchains(), Release(12, 6)).root / "bin/ptxas"
    command = ["sh", script, "-arch=sm_90", "--output-file", tmp_path / "kernel.o", source, "-O3"]
    done = subprocess.run(command, env={**os.environ, "PTXAS": str(ptxas)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    body = [line.strip() for line in source.read_text().splitlines()[8:-2]]
    assert body == [changed or line.strip() for line, changed in STORES.items()]
    assert (tmp_path / "kernel.o").stat().st_size > 0
