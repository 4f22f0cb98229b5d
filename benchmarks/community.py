"""Builds the kernel projects of a public repository, loads them, runs their tests, and writes docs/compatibility.md.

    git clone https://github.com/huggingface/kernels-community
    .venv/bin/python benchmarks/community.py build kernels-community       build one variant of each backend
    .venv/bin/python benchmarks/community.py load kernels-community        load them with the public client
    .venv/bin/python benchmarks/community.py outside OWNER/NAME=DIR ...    any number of other repositories
    .venv/bin/python benchmarks/community.py page                          write docs/compatibility.md

Packages go to OUT/<project>/, and never into the checkout. Each command adds to the JSON of results, so that a run of
one project (`--project`) replaces the results of that project alone.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import result_files
from community_page import PAGE, page
from figures import ROOT, children_cpu_seconds, describe_commit, machine

from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import FullAbi, Release, Variant, this_platform
from kernel_format.errors import KernelBuilderError
from kernel_format.files import write_atomically

RESULTS = ROOT / "benchmarks" / "results" / "community.json"

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


@dataclass(frozen=True)
class Checkout:
    """A repository with one kernel project in each directory. `names` selects some of them; empty for all."""

    root: Path
    names: tuple[str, ...] = ()

    @property
    def projects(self) -> list[Path]:
        """The directories that have a `build.toml`, sorted by name."""
        projects = sorted(path.parent for path in self.root.glob("*/build.toml"))
        return [path for path in projects if not self.names or path.name in self.names]

    @property
    def commit(self) -> str:
        """The commit of the checkout."""
        command = ["git", "-C", str(self.root), "log", "-1", "--format=%h of %cs"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def select_variants(project: Project, torch: str | None = None) -> tuple[Variant, ...]:
    """Return one variant of each backend: that of the newest Torch and the oldest CUDA, for this platform.

    Args:
        torch: Select this Torch release of a project on the full C++ ABI in place of the newest.
    """
    chosen: dict[str, Variant] = {}
    for variant in offered.variants(project, whole=torch is not None):
        if variant.platform not in (None, this_platform()):
            continue
        single = isinstance(variant.framework, FullAbi)
        if single and torch and (str(variant.framework) != _full_abi(torch) or _is_stable(project, variant)):
            continue
        known = chosen.get(variant.backend.name)
        if known is None or _preference(variant) > _preference(known):
            chosen[variant.backend.name] = variant
    return tuple(chosen.values())


def _full_abi(torch: str) -> str:
    return str(FullAbi(Release.parse(torch)))


def _is_stable(project: Project, variant: Variant) -> bool:
    return variant.backend in getattr(project.framework, "stable_abi", ())


def _preference(variant: Variant) -> tuple[Any, ...]:
    """Return the sort key of a variant: the newest Torch, then the oldest release of CUDA 13."""
    cuda = variant.release or Release(0, 0)
    release = getattr(variant.framework, "release", Release(0, 0))
    return release, cuda.major >= _CUDA, tuple(-number for number in cuda)


def kernel_builder(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command that a user types."""
    command = [sys.executable, "-m", "kernel_builder", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not finished within {timeout:.0f} seconds")


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a failed `build --json`, or the end of what it printed."""
    try:
        return str(json.loads(done.stdout)["message"])
    except ValueError:
        return (done.stderr or done.stdout)[-_TAIL:].strip()


def read_results(path: Path) -> dict[str, Any]:
    """Read the JSON of results, or return an empty one."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"projects": {}}
    return results


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace the JSON of results."""
    result_files.write(path, results, sort_keys=True)


@click.group()
def main() -> None:
    """Build, load and test the kernel projects of a public repository."""


def _options(command: Any) -> Any:
    for option in (
        click.option("--json", "json_file", type=click.Path(path_type=Path), default=RESULTS, help="Add results here."),
        click.option("--out", type=click.Path(path_type=Path), default=Path("community-build"), help="Packages."),
        click.option("--project", "names", multiple=True, metavar="NAME", help="Only this project; may be repeated."),
        click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path)),
    ):
        command = option(command)
    return command


@main.command("build")
@_options
@click.option("--backend", "backends", multiple=True, help="Only this backend; may be repeated.")
@click.option("--capability", default="9.0", show_default=True, help="The CUDA capability to compile for.")
@click.option("--torch", help="This Torch release in place of the newest, for projects on the full C++ ABI.")
@click.option("--timeout", type=float, default=7200, show_default=True, help="Seconds for one variant.")
@click.option("--jobs", type=int, help="Processors to use at most.")
def build_projects(
    directory: Path,
    names: tuple[str, ...],
    out: Path,
    json_file: Path,
    backends: tuple[str, ...],
    capability: str,
    torch: str | None,
    timeout: float,
    jobs: int | None,
) -> None:
    """Build one variant of each backend of every project."""
    checkout = Checkout(directory, names)
    results = read_results(json_file)
    results["checkout"] = checkout.commit
    results["builder"] = describe_commit()
    results["machine"] = machine("torch", "kernels")
    if not names:
        results["check-config"] = time_check_config(checkout)
    for root in checkout.projects:
        entry = results["projects"].setdefault(root.name, {"variants": {}})
        try:
            project = read_project(root)
        except KernelBuilderError as error:
            entry.update(accepted=False, reason=str(error))
            continue
        entry.update(accepted=True, reason=None, backends=list(map(str, project.backends)))
        try:
            variants = select_variants(project, torch)
        except KernelBuilderError as error:
            entry["reason"] = str(error)
            variants = ()
        for variant in variants:
            if backends and variant.backend.name not in backends:
                continue
            entry["variants"][variant.name] = build_variant(root, variant, out, capability, timeout, jobs)
            write_results(json_file, results)
            click.echo(f"{root.name} {variant.name}: {entry['variants'][variant.name]['status']}")
    write_results(json_file, results)


def time_check_config(checkout: Checkout) -> dict[str, Any]:
    """Run `check-config` over all projects. `accepted` counts those that it accepts."""
    started = time.monotonic()
    done = kernel_builder("check-config", "--json", *map(str, checkout.projects))
    seconds = time.monotonic() - started
    return {"projects": len(checkout.projects), "seconds": round(seconds, 2), "status": done.returncode}


def build_variant(
    root: Path, variant: Variant, out: Path, capability: str, timeout: float, jobs: int | None, *, load: bool = False
) -> dict[str, Any]:
    """Build one variant and return what happened."""
    arguments = ["build", str(root), "--variant", variant.name, "--out", str(out / root.name), "--json"]
    arguments += ["--load" if load else "--no-load"]
    if variant.backend.name == "cuda" and variant.release:
        arguments += ["--capability", capability]
    if _imports_unchecked(root):
        arguments += ["--allow", "python-imports"]
    if jobs:
        arguments += ["--jobs", str(jobs)]
    started, before = time.monotonic(), children_cpu_seconds()
    done = kernel_builder(*arguments, timeout=timeout)
    outcome: dict[str, Any] = {
        "backend": variant.backend.name,
        "compiled": variant.platform is not None,
        "status": "built" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - started, 1),
        "cpu-seconds": round(children_cpu_seconds() - before, 1),
        "command": "kernel-builder " + " ".join(arguments),
    }
    if done.returncode == 0:
        summary = json.loads(done.stdout)
        outcome["compiles"] = summary["compiles"]
        outcome["bytes"] = sum(package["bytes"] for package in summary["packages"])
        if variant.release:
            outcome["capability"] = capability
        if load:
            (package,) = summary["packages"]
            outcome["load"] = "loaded" if "load" in package["passed-checks"] else package["skipped-checks"]["load"]
    else:
        outcome["reason"] = reason(done)
    return outcome


def _imports_unchecked(root: Path) -> bool:
    """Return whether the project tells the public builder not to try its imports."""
    flake = root / "flake.nix"
    return flake.is_file() and "doGetKernelCheck = false" in flake.read_text()


@main.command("load")
@_options
@click.option("--python", default=sys.executable, help="A Python whose Torch is of the release that was built for.")
def load_projects(directory: Path, names: tuple[str, ...], out: Path, json_file: Path, python: str) -> None:
    """Load every package that was built with the public client.

    On a machine without a GPU, a CUDA binary is loaded by the dynamic linker alone, which resolves all its symbols.
    """
    results = read_results(json_file)
    for root in Checkout(directory, names).projects:
        for name, outcome in results["projects"].get(root.name, {}).get("variants", {}).items():
            if outcome["status"] != "built":
                continue
            package = (out / root.name / name).resolve()
            command = [python, "-c", _LOAD, str(package), outcome["backend"]]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            words = done.stderr.strip().splitlines() or ["no message"]
            outcome["load"] = done.stdout.split()[-1] if done.returncode == 0 else words[-1]
            write_results(json_file, results)
            click.echo(f"{root.name} {name}: {outcome['load']}")


@main.command("outside")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=RESULTS, help="Add results here.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("community-build"), help="Packages.")
@click.option("--backend", "backends", multiple=True, help="Build compiled variants of this backend; may be repeated.")
@click.option("--torch", help="The Torch release that is installed, which loads the packages.")
@click.option("--timeout", type=float, default=7200, show_default=True, help="Seconds for one variant.")
@click.argument("repositories", nargs=-1, required=True, metavar="OWNER/NAME=DIR...")
def outside(
    json_file: Path,
    out: Path,
    backends: tuple[str, ...],
    torch: str | None,
    timeout: float,
    repositories: tuple[str, ...],
) -> None:
    """Try the kernel projects and the setup.py of other repositories: is each accepted, built, loaded?

    DIR is a checkout, or a git directory without a work tree. The files of the commit are copied; the copies are
    changed by `update-build --license` and `port`. Compiled variants are built for the backends that are named.
    """
    results = read_results(json_file)
    results["outside"] = {"builder": describe_commit(), "machine": machine("torch", "kernels"), "repositories": {}}
    for repository in repositories:
        name, _, directory = repository.partition("=")
        with tempfile.TemporaryDirectory() as copies:
            commit = checked_out(Path(directory), Path(copies))
            entry: dict[str, Any] = {"commit": commit, "projects": {}, "ported": {}}
            results["outside"]["repositories"][name] = entry
            for file in sorted(Path(copies).rglob("build.toml")):
                if "templates" not in file.parts and "[general]" in file.read_text(errors="replace"):
                    path = file.parent.relative_to(copies).as_posix()
                    outcome = try_project(file.parent, out / name / path, backends, torch, timeout)
                    entry["projects"][path] = outcome
                    click.echo(f"{name} {path}: {outcome['status']}")
            for file in sorted(Path(copies).rglob("setup.py")):
                if re.search(r"\b(CUDA|Cpp)Extension\b", file.read_text(errors="replace")):
                    path = file.relative_to(copies).as_posix()
                    entry["ported"][path] = try_port(file)
                    click.echo(f"{name} {path}: {entry['ported'][path]['status']}")
            write_results(json_file, results)


def checked_out(repository: Path, into: Path) -> str:
    """Copy the files of a repository's newest commit, but for those that a snapshot lacks; return the commit."""
    git_directory = repository / ".git" if (repository / ".git").exists() else repository
    git = ["git", "--git-dir", str(git_directory)]
    with tempfile.NamedTemporaryFile() as index:
        environment = {**os.environ, "GIT_INDEX_FILE": f"{index.name}.index"}
        subprocess.run([*git, "read-tree", "HEAD"], env=environment, check=True)
        copying = [*git, f"--work-tree={into}", "checkout-index", "--all", "--quiet", f"--prefix={into}/"]
        subprocess.run(copying, env=environment, check=False, capture_output=True)
        Path(f"{index.name}.index").unlink()
    done = subprocess.run([*git, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def try_project(root: Path, out: Path, backends: Sequence[str], torch: str | None, timeout: float) -> dict[str, Any]:
    """Return whether a project is accepted, as it is or after `update-build`, and what its packages do."""
    status, done = "accepted", kernel_builder("check-config", "--json", str(root))
    if done.returncode:
        kernel_builder("update-build", "--license", "other", str(root))
        status, done = "updated", kernel_builder("check-config", "--json", str(root))
        if done.returncode:
            return {"status": "refused", "reason": reason(done)}
    project, variants = read_project(root), {}
    for variant in select_variants(project, torch):
        if variant.platform is None or variant.backend.name in backends:
            variants[variant.name] = build_variant(root, variant, out, "9.0", timeout, None, load=True)
            del variants[variant.name]["command"]  # it names a copy that is gone
    return {"status": status, "variants": variants}


def try_port(setup: Path) -> dict[str, Any]:
    """Return whether `port` understands a setup.py and `check-config` accepts what it writes."""
    (setup.parent / "build.toml").unlink(missing_ok=True)
    for command in (["port", "--json", str(setup)], ["check-config", "--json", str(setup.parent)]):
        done = kernel_builder(*command)
        if done.returncode:
            return {"status": f"{command[0]} refused", "reason": reason(done)}
    return {"status": "accepted"}


@main.command("page")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=RESULTS, help="The results.")
@click.option("--markdown", type=click.Path(path_type=Path), default=PAGE, help="Write the page to this file.")
@click.option("--tests", type=click.Path(path_type=Path), help="Add what community_tests.py wrote to the results.")
@click.option("--compare", type=click.Path(path_type=Path), help="Add what community_compare.py wrote to the results.")
def write_page(json_file: Path, markdown: Path, tests: Path | None, compare: Path | None) -> None:
    """Write docs/compatibility.md from the results."""
    results = read_results(json_file)
    for name, file in (("tests", tests), ("compare", compare)):
        if file:
            results[name] = json.loads(file.read_text())
            write_results(json_file, results)
    write_atomically(markdown, page(results).encode())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
