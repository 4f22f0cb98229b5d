"""Builds the kernel projects of a public repository and loads the packages, for docs/compatibility.md.

    git clone https://github.com/huggingface/kernels-community
    .venv/bin/python benchmarks/community.py build kernels-community     build one variant of each back end
    .venv/bin/python benchmarks/community.py load kernels-community      load them with the public client
    .venv/bin/python benchmarks/pages.py                                 write docs/compatibility.md

Packages go to OUT/<project>/, and never into the checkout. With `--project`, a command replaces the results of that
project alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from recording import RESULTS, children_cpu_seconds, commit, machine, write

from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, Variant, this_platform
from kernel_format.errors import KernelBuilderError

FILE = RESULTS / "community.json"

_CUDA = 13  # the major release that the builder has nvcc for; clang compiles for CUDA 12
_TAIL = 2_000  # characters of a failed command that the results keep

# Loads a package as `get_kernel` does. On a machine without a GPU, the client refuses CUDA packages; their symbols can
# be resolved all the same if Torch is built for CUDA.
_LOAD = """
import ctypes, os, sys
from pathlib import Path
import torch
directory, backend = Path(sys.argv[1]), sys.argv[2]
if backend == "cuda" and not torch.cuda.is_available() and list(directory.glob("*.so")):
    for binary in directory.glob("*.so"):
        ctypes.CDLL(str(binary), os.RTLD_NOW)
    print("resolved")
else:
    from kernels import get_local_kernel
    get_local_kernel(directory, backend=backend, trust_remote_code=True)
    print("loaded")
"""


def find_projects(checkout: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the directories of a checkout that have a `build.toml`, or those with these names."""
    projects = sorted(path.parent for path in checkout.glob("*/build.toml"))
    return [path for path in projects if not names or path.name in names]


def select_variants(project: Project) -> list[Variant]:
    """Return one variant of each back end: that of the newest Torch and the oldest CUDA, for this platform."""

    def preference(variant: Variant) -> tuple[Any, ...]:
        cuda = variant.release or Release(0, 0)
        torch = getattr(variant.framework, "release", Release(0, 0))
        return torch, cuda.major >= _CUDA, tuple(-number for number in cuda)

    chosen: dict[str, Variant] = {}
    for variant in offered.variants(project):
        if variant.platform in (None, this_platform()):
            known = chosen.get(variant.backend.name)
            if known is None or preference(variant) > preference(known):
                chosen[variant.backend.name] = variant
    return list(chosen.values())


def kernel_builder(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types."""
    command = [sys.executable, "-m", "kernel_builder", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not finished within {timeout:.0f} seconds")


def read_results(file: Path) -> dict[str, Any]:
    """Read the JSON of results, or return an empty one."""
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"projects": {}}
    return results


@click.group()
def main() -> None:
    """Build and load the kernel projects of a public repository."""


def _options(command: Any) -> Any:
    for option in (
        click.option("--json", "file", type=click.Path(path_type=Path), default=FILE, help="Add results here."),
        click.option("--out", type=click.Path(path_type=Path), default=Path("community-build"), help="Packages."),
        click.option("--project", "names", multiple=True, metavar="NAME", help="Only this project; may be repeated."),
        click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path)),
    ):
        command = option(command)
    return command


@main.command("build")
@_options
@click.option("--capability", default="9.0", show_default=True, help="The CUDA capability to compile for.")
@click.option("--timeout", type=float, default=7200, show_default=True, help="Seconds for one variant.")
def build_projects(
    directory: Path, names: tuple[str, ...], out: Path, file: Path, capability: str, timeout: float
) -> None:
    """Build one variant of each back end of every project."""
    results = read_results(file)
    git = ["git", "-C", str(directory), "log", "-1", "--format=%h of %cs"]
    results["checkout"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    results["builder"], results["machine"] = commit(), machine("kernels")
    projects = find_projects(directory, names)
    if not names:
        started = time.monotonic()
        kernel_builder("check-config", "--json", *map(str, projects))
        results["check-config"] = {"projects": len(projects), "seconds": round(time.monotonic() - started, 2)}
    for root in projects:
        entry: dict[str, Any] = {"accepted": False, "reason": None, "variants": {}}
        results["projects"][root.name] = entry
        try:
            project = read_project(root)
            entry.update(accepted=True, backends=list(map(str, project.backends)))
            variants = select_variants(project)
        except KernelBuilderError as error:
            entry["reason"] = str(error)
            continue
        for variant in variants:
            entry["variants"][variant.name] = build_variant(root, variant, out, capability, timeout)
            write(file, results)
            click.echo(f"{root.name} {variant.name}: {entry['variants'][variant.name]['status']}")
    write(file, results)


def build_variant(root: Path, variant: Variant, out: Path, capability: str, timeout: float) -> dict[str, Any]:
    """Build one variant and return the outcome."""
    arguments = ["build", str(root), "--variant", variant.name, "--out", str(out / root.name), "--no-load", "--json"]
    if variant.backend.name == "cuda" and variant.release:
        arguments += ["--capability", capability]
    flake = root / "flake.nix"
    if flake.is_file() and "doGetKernelCheck = false" in flake.read_text():
        arguments += ["--allow", "python-imports"]  # the project tells the public builder not to try its imports
    before = children_cpu_seconds()
    done = kernel_builder(*arguments, timeout=timeout)
    outcome: dict[str, Any] = {
        "backend": variant.backend.name,
        "compiled": variant.platform is not None,
        "status": "built" if done.returncode == 0 else "failed",
        "cpu-seconds": round(children_cpu_seconds() - before, 1),
    }
    if done.returncode == 0:
        summary = json.loads(done.stdout)
        outcome["compiles"] = summary["compiles"]
        outcome["bytes"] = sum(package["bytes"] for package in summary["packages"])
    else:
        try:
            outcome["reason"] = str(json.loads(done.stdout)["message"])
        except ValueError:
            outcome["reason"] = (done.stderr or done.stdout)[-_TAIL:].strip()
    return outcome


@main.command("load")
@_options
@click.option("--python", default=sys.executable, help="A Python whose Torch is of the release that was built for.")
def load_projects(directory: Path, names: tuple[str, ...], out: Path, file: Path, python: str) -> None:
    """Load every built package with the public client.

    On a machine without a GPU, a CUDA binary is loaded by the dynamic linker alone, which resolves all its symbols.
    """
    results = read_results(file)
    for root in find_projects(directory, names):
        for name, outcome in results["projects"].get(root.name, {}).get("variants", {}).items():
            if outcome["status"] == "built":
                package = (out / root.name / name).resolve()
                command = [python, "-c", _LOAD, str(package), outcome["backend"]]
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
                message = done.stderr.strip().splitlines() or ["no message"]
                outcome["load"] = done.stdout.split()[-1] if done.returncode == 0 else message[-1]
                write(file, results)
                click.echo(f"{root.name} {name}: {outcome['load']}")


if __name__ == "__main__":
    main()
