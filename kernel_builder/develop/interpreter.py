"""The interpreter of a test shell: the current one if its Torch loads the variant, or else a virtual environment.

Virtual environments are in the builder's cache, and shared by all projects that need the same packages.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_builder.config.project import Project, distribution_name
from kernel_builder.config.variant import FullAbi, Release, TvmFfiAbi, Variant
from kernel_builder.develop.choice import loadable
from kernel_builder.progress import Progress
from kernel_builder.steps.graph import digest
from kernel_format import files
from kernel_format.errors import ToolchainError

TORCH_INDEX = "https://download.pytorch.org/whl"


def find(project: Project, variant: Variant, cache: Path, progress: Progress) -> Path:
    """Return an interpreter with a Torch that loads the variant, the client, pytest and the kernel's dependencies."""
    if loadable([variant]):
        if importlib.util.find_spec("pytest") is None:
            progress.say(f"pytest is not installed: {sys.executable} -m pip install pytest")
        return Path(sys.executable)
    torch, build = torch_build(variant)
    depends = [*project.python_depends, *project.backend_python_depends.get(variant.backend, ())]
    if isinstance(variant.framework, TvmFfiAbi):
        depends.append("tvm-ffi")
    packages = [f"torch=={torch}.*", "kernels", "numpy", "pytest", *map(distribution_name, depends)]
    key = digest(sys.version, sys.base_prefix, packages, build)[:16]
    directory = cache / "environments" / f"torch{torch.digits}-{build}-{key}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    python = directory / "bin" / "python"
    with files.locked(directory.with_suffix(".lock"), waiting=lambda: progress.say(f"waiting for {directory}")):
        if not (directory / "complete").is_file():
            progress.say(f"installing Torch {torch} ({build}) in {directory}")
            shutil.rmtree(directory, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(directory)], "install Python's venv (Debian: python3-venv)")
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run(
                [*pip, "--extra-index-url", f"{TORCH_INDEX}/{build}", *packages],
                "check the connection to the package index, or install a matching Torch beside kernel-builder",
            )
            (directory / "complete").touch()
    if not loadable([variant], str(python)):
        raise ToolchainError(
            "the client does not load this variant into the Torch that pip has installed",
            where=f"{variant.name}, {directory}",
            hint=f"`{python} -m pip list` shows its version; delete the directory to install it again",
        )
    return python


def torch_build(variant: Variant) -> tuple[Release, str]:
    """Return the Torch release to test a variant with, and the name of its build. It is the newest that fits."""
    backend = variant.backend
    if isinstance(variant.framework, FullAbi):
        return variant.framework.release, backend.torch_index(variant.release)
    fitting = {
        torch: builds
        for torch, releases in backend.published().items()
        if (builds := [release for release in releases if backend.can_load(variant.release, release)])
    }
    if not fitting:
        raise ToolchainError(
            "the matrix has no Torch release for "
            f"{f'{backend.title} {variant.release}' if variant.release else backend.name}",
            where=variant.name,
            hint="install a Torch that loads the variant beside kernel-builder",
        )
    torch = max(fitting)
    return torch, backend.torch_index(fitting[torch][0])


def _run(command: list[str], hint: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last_line = done.stdout.strip().rpartition("\n")[2]
        raise ToolchainError(
            f"the command failed with status {done.returncode}: {last_line}", where=shlex.join(command), hint=hint
        )
