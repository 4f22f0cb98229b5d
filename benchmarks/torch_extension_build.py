"""Builds rmsnorm with torch.utils.cpp_extension, and compares its CPU time with kernel-builder's."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

from builder_runs import JOBS, CompletedRun, Workspace
from figures import Measured, Row, Values, children_cpu_seconds

import kernel_builder
from kernel_builder.backends.cuda import CUDA as CUDA_BACKEND
from kernel_builder.config import matrix
from kernel_builder.config.kernel_sources import is_header
from kernel_builder.config.project import Project, TorchFramework
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, this_platform

CUDA = Release(13, 0)


def sources_of(project: Project, backend: str) -> list[str]:
    """Return the sources that are compiled for a backend, the binding first."""
    assert isinstance(project.framework, TorchFramework)
    parts = [project.framework.src, *(kernel.src for kernel in project.kernels if kernel.backend.name == backend)]
    return [source for part in parts for source in part if not is_header(source)]


@dataclass(frozen=True)
class TorchExtension:
    """The input of a build with `torch.utils.cpp_extension`.

    Attributes:
        include: Include directories before those of the installed Torch.
    """

    sources: tuple[str, ...]
    include: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    cuda_home: str
    directory: str


def build_torch_extension(extension: TorchExtension) -> tuple[float, int]:
    """Build with `torch.utils.cpp_extension`, in a process that ends afterwards.

    Returns:
        CPU time of the compilers and the linker in seconds, and the size of the shared object in bytes.
    """
    from torch.utils import cpp_extension

    directory = Path(extension.directory)
    stubs = directory / "stubs"
    stubs.mkdir(parents=True)
    # A CPU-only Torch lacks the libraries that a CUDA extension links.
    for name in ("c10_cuda", "torch_cuda", "cudart"):
        command = ["g++", "-shared", "-x", "c++", os.devnull, "-o", str(stubs / f"lib{name}.so")]
        subprocess.run(command, check=True)
    cpp_extension.CUDA_HOME = extension.cuda_home
    os.environ.update(MAX_JOBS=str(JOBS), TORCH_NO_COMPILER_WRAPPER="1")  # no compiler cache
    before = children_cpu_seconds()
    # `cpp_extension.load` would import the result as well, which needs CUDA.
    cpp_extension._write_ninja_file_and_build_library(
        name="rmsnorm",
        sources=list(extension.sources),
        extra_cflags=["-O3", "-DCUDA_KERNEL", "-DUSE_CUDA"],
        extra_cuda_cflags=["-O3", *extension.cuda_flags],
        extra_sycl_cflags=[],
        extra_ldflags=[f"-L{stubs}"],
        extra_include_paths=list(extension.include),
        build_directory=str(directory),
        verbose=False,
        with_cuda=True,
        with_sycl=False,
    )
    return children_cpu_seconds() - before, (directory / "rmsnorm.so").stat().st_size


def _gencode(capability: str) -> str:
    number = capability.removesuffix("+PTX").replace(".", "")
    ptx = f",compute_{number}" if capability.endswith("+PTX") else ""
    return f"-gencode=arch=compute_{number},code=[sm_{number}{ptx}]"


def compare_with_torch_extension(workspace: Workspace) -> Measured:
    """Build rmsnorm's CUDA binary with kernel-builder and with `torch.utils.cpp_extension`."""
    root = workspace.project("beside")

    def build(name: str) -> CompletedRun:
        chosen = ("--backend", "cuda", "--cuda-compiler", "nvcc", "--no-load")
        return workspace.build(workspace.cache(name), root, *chosen, "--out", str(root / name))

    # Other load on the machine slows compilers down, so the other builds run between two of ours.
    before = build("beside")
    binary = next((root / "beside").rglob("*.so"))
    theirs, size = _build_torch_extensions(workspace, root)
    after = build("again")
    values = {
        "cpu-seconds": [done.result["cpu-seconds"] for done in (before, after)],
        "cpu-seconds-of-whole-command": [before.cpu_seconds, after.cpu_seconds],
        "cpp-extension-cpu-seconds": theirs,
        "bytes": binary.stat().st_size,
        "cpp-extension-bytes": size,
    }
    return Measured((before.command, "benchmarks/builder.py --only cpp-extension"), values)


def _build_torch_extensions(workspace: Workspace, root: Path) -> tuple[dict[str, float], int]:
    """Build with the headers of the installed Torch and of the newest one; return CPU times and the size in bytes."""
    project, newest = read_project(root), matrix.torch_releases()[-1]
    fetched = workspace.run(
        workspace.root / "caches" / "beside",
        *("toolchain", "fetch", "--cuda", str(CUDA), "--torch", str(newest), "--headers", "full", "--json"),
    )
    toolkit, *_, headers = (entry["path"] for entry in fetched.result)
    # A kernel of another backend has no capabilities, which `archs` takes for all.
    kernels = [kernel for kernel in project.kernels if kernel.backend.name == "cuda"]
    newest_include = [headers, f"{headers}/torch/csrc/api/include"]
    cpu_seconds, size = {}, 0
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for label, include in (("installed", []), (str(newest), newest_include)):
            extension = TorchExtension(
                sources=tuple(str(root / source) for source in sources_of(project, "cuda")),
                include=(*include, str(root), str(Path(kernel_builder.__file__).parent / "templates")),
                cuda_flags=tuple(map(_gencode, CUDA_BACKEND.archs(kernels, CUDA, this_platform()))),
                cuda_home=toolkit,
                directory=str(workspace.root / "torch" / label),
            )
            cpu_seconds[label], size = pool.apply(build_torch_extension, (extension,))
    return cpu_seconds, size


def torch_extension_row(values: Values) -> Row:
    """Return the row. The pair of measurements with the largest ratio has to meet the target."""
    ours, theirs = values["cpu-seconds"], values["cpp-extension-cpu-seconds"]
    ratio = statistics.mean(ours) / statistics.mean(theirs.values())
    largest = max(ours) / min(theirs.values())
    by_headers = ", ".join(f"{seconds:.1f} s (Torch headers: {label})" for label, seconds in theirs.items())
    return Row(
        "cold build of rmsnorm's CUDA binary: CPU time as a ratio of `torch.utils.cpp_extension`'s, which builds the "
        "same sources and capabilities once for each Torch release",
        "at most 0.55 for two releases and 0.2 for six",
        ", ".join(f"{ratio / releases:.3f} for {releases}" for releases in (1, 2, 6)),
        largest / 2 <= 0.55 and largest / 6 <= 0.2,
        f"CPU time of compilers and linkers: kernel-builder {ours[0]:.1f} s before and {ours[1]:.1f} s after the other "
        f"builds, for all Torch releases; cpp_extension {by_headers}, for one. The ratios are of the means; the "
        f"largest ratio of two measurements has to meet the target, and is {largest / 2:.3f} for two releases. CUDA "
        f"{CUDA}, {JOBS} jobs, -O3. kernel-builder's binary has {values['bytes'] / 1e6:.1f} MB with compressed device "
        f"code, the other {values['cpp-extension-bytes'] / 1e6:.1f} MB.",
    )
