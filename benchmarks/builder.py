"""Measures the figures of docs/figures.md with the commands that a user types, in about ten minutes on two cores.

    .venv/bin/python benchmarks/builder.py                      all figures
    .venv/bin/python benchmarks/builder.py --only downloads     one figure; the others keep their results
    .venv/bin/python benchmarks/pages.py                        write them into README.md and docs/figures.md

Builds use copies of the projects and caches of their own, which share only the user's downloaded toolchains. CPU time
includes child processes; on a busy machine it is more reliable than wall time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from counting_index import CountingIndex
from recording import RESULTS, ROOT, children_cpu_seconds, commit, machine, write

from kernel_builder.config.variant import this_platform
from kernel_builder.measure.results import estimate
from kernel_format.cache_directory import default_cache

FILE = RESULTS / "builder.json"
JOBS = 2
REPEATS = 10
BUILDER = Path(sys.executable).with_name("kernel-builder")

# A step's line on stderr. A compile's title ends with its backend.
_STEP = re.compile(r"^\[\d+/\d+\] (link .*|.* \(\w+(?: [\d.]+)?\))$", re.MULTILINE)

Values = Mapping[str, Any]
"""The measured numbers of one figure, as the JSON has them."""


def steps_of(output: str) -> list[str]:
    """Return the titles of the compile and link steps that a build names on stderr."""
    return _STEP.findall(output)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median of samples, its 95 % interval, and the number of samples."""
    return {**estimate(samples)._asdict(), "n": len(samples)}


@dataclass(frozen=True)
class CompletedRun:
    """A `kernel-builder` command that succeeded.

    Attributes:
        command: As a user types it, without the temporary directory.
        seconds: Wall time.
        cpu_seconds: CPU time of the process and its children, user and system.
        result: The parsed output of a command with `--json`, else None.
        steps: Titles of the compile and link steps that a build ran.
    """

    command: str
    seconds: float
    cpu_seconds: float
    result: Any
    steps: list[str]


class Workspace:
    """A temporary directory with copies of projects, caches, and builds that several figures use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def project(self, place: str, source: str = "kernels/rmsnorm") -> Path:
        """Copy a project of this repository, without its `build` directory, to a directory in `place`."""
        copy = self.root / place / Path(source).name
        return Path(shutil.copytree(ROOT / source, copy, ignore=shutil.ignore_patterns("build", "__pycache__")))

    def cache(self, name: str) -> Path:
        """Create a cache without compiled objects that shares the user's downloaded toolchains."""
        cache = self.root / "caches" / name
        cache.mkdir(parents=True)
        (cache / "toolchains").symlink_to(default_cache() / "toolchains", target_is_directory=True)
        return cache

    def run(
        self, cache: Path, *arguments: str | Path, builder: Path = BUILDER, environment: Mapping[str, str] | None = None
    ) -> CompletedRun:
        """Run `kernel-builder` with these arguments.

        Raises:
            RuntimeError: If it fails; the text has its output.
        """
        command = list(map(str, arguments))
        env = {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **(environment or {})}
        before, started = children_cpu_seconds(), perf_counter()
        done = subprocess.run([str(builder), *command], capture_output=True, text=True, check=False, env=env)
        seconds, cpu_seconds = perf_counter() - started, children_cpu_seconds() - before
        shown = shlex.join(["kernel-builder", *command]).replace(f"{self.root}/", "")
        if done.returncode:
            raise RuntimeError(f"{shown}\n{done.stdout}{done.stderr}")
        result = json.loads(done.stdout) if "--json" in command else None
        return CompletedRun(shown.removesuffix(" --json"), seconds, cpu_seconds, result, steps_of(done.stderr))

    def build(self, cache: Path, project: Path, *options: str, jobs: int = JOBS, **environment: str) -> CompletedRun:
        """Run `kernel-builder build`.

        Raises:
            RuntimeError: If it fails, or if its steps cannot be read from its output.
        """
        done = self.run(cache, "build", project, *options, "--jobs", str(jobs), "--json", environment=environment)
        if len(done.steps) != done.result["steps"]:
            raise RuntimeError(f"{done.command}: ran {done.result['steps']} steps, its output has {done.steps}")
        return done

    @cached_property
    def first_build(self) -> tuple[Path, Path, CompletedRun]:
        """A project, its cache, and the cold build of the variants that the Hub asks for."""
        project, cache = self.project("cold"), self.cache("cold")
        return project, cache, self.build(cache, project)

    @cached_property
    def installed_builder(self) -> Path:
        """The command of wheels that are built and installed into a new environment."""
        wheels, environment = self.root / "wheels", self.root / "installed"
        python = sys.executable
        sources = [*(ROOT / f"packages/kernel-{name}" for name in ("format", "sandbox", "aot", "emulator")), ROOT]
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", wheels, *sources], check=True, stdout=sys.stderr)
        subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
        target = environment / "bin/python"
        install = [*pip, "--python", target, "install", "-q", *sorted(wheels.glob("*.whl"))]
        subprocess.run(install, check=True, stdout=sys.stderr)
        return environment / "bin/kernel-builder"


def downloads(workspace: Workspace) -> tuple[list[str], Values]:
    """Count the bytes from the package index for a build with an empty cache."""
    cache = workspace.root / "caches" / "bare"
    with CountingIndex() as index:
        done = workspace.build(cache, workspace.project("bare"), PIP_INDEX_URL=index.url)
        total = sum(index.received.values())
        workspace.run(cache, "toolchain", "fetch", "--cuda", "13.2", environment={"PIP_INDEX_URL": index.url})
        more = sum(index.received.values()) - total
    return [f"PIP_INDEX_URL=URL {done.command}"], {"bytes": total, "more-with-all": more}


def further_torch(workspace: Workspace) -> tuple[list[str], Values]:
    """Build a project on the full C++ ABI for a Torch release, then for another."""
    project, cache = workspace.project("further", "tests/projects/full-scale"), workspace.cache("further")

    def build(torch: str) -> CompletedRun:
        variants = (f"--variant=torch{torch}-cxx11-{backend}-x86_64-linux" for backend in ("cpu", "cu130"))
        return workspace.build(cache, project, *variants, "--no-load")

    first, further = build("213"), build("215")
    return [first.command, further.command], {"steps": further.steps}


def nothing_changed(workspace: Workspace) -> tuple[list[str], Values]:
    """Build an up-to-date project again, by an installed wheel."""
    project, cache, _ = workspace.first_build

    def build() -> CompletedRun:
        return workspace.run(cache, "build", project, builder=workspace.installed_builder)

    build()
    runs = [build() for _ in range(REPEATS)]
    return [runs[0].command], {"seconds": summary([run.seconds for run in runs])}


def one_source(workspace: Workspace) -> tuple[list[str], Values]:
    """Change one source of several, and build again."""
    built, cache, _ = workspace.first_build
    project = Path(shutil.copytree(built, workspace.root / "changed" / built.name))
    with (project / "rmsnorm_cuda/forward.cu").open("a") as stream:
        stream.write("// Changed.\n")
    # Each compiler of device code compiles the source; the figure is that of one.
    done = workspace.build(cache, project, "--backend", "cuda", "--cuda-compiler", "nvcc")
    return [done.command], {"steps": done.steps}


def warm_cache(workspace: Workspace) -> tuple[list[str], Values]:
    """Build another checkout with the cache of the first build."""
    _, cache, cold = workspace.first_build
    warm = workspace.build(cache, workspace.project("checkout"))
    return [cold.command, warm.command], {"cold-cpu-seconds": cold.cpu_seconds, "warm-cpu-seconds": warm.cpu_seconds}


_LOAD = """
import sys, time
from pathlib import Path
import torch
import kernels
times = [time.perf_counter()]
for _ in range(2):
    kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu")
    times.append(time.perf_counter())
print(*(end - start for start, end in zip(times, times[1:])))
"""


def load_time(workspace: Workspace) -> tuple[list[str], Values]:
    """Load a built kernel twice in each of several fresh processes."""
    command = [sys.executable, "-c", _LOAD, str(workspace.first_build[0])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pairs = []
    for _ in range(REPEATS):
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        pairs.append([float(seconds) * 1e3 for seconds in printed.split()])
    first, second = zip(*pairs, strict=True)
    values = {"milliseconds": summary(first), "second-milliseconds": summary(second)}
    return ['get_local_kernel(Path("kernels/rmsnorm"), backend="cpu")'], values


CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")


def triton(workspace: Workspace) -> tuple[list[str], Values]:
    """Build the tests' Triton kernels ahead of time, with a cache that has nothing of them."""
    names = sorted(path.name for path in (ROOT / "tests/aot_kernels").iterdir())
    projects = [workspace.project("triton", f"tests/aot_kernels/{name}") for name in names]
    for project in projects:
        aot = project / "aot.toml"
        aot.write_text(f"capabilities = {json.dumps(CAPABILITIES)}\n{aot.read_text()}")
    variant = f"torch-stable-abi210-cu130-{this_platform()}"
    done = workspace.run(workspace.cache("triton"), "build", *projects, "--variant", variant, "--jobs", str(JOBS))
    counts = {"kernels": len(projects), "capabilities": len(CAPABILITIES)}
    return [done.command], {"seconds": done.seconds, "cpu-seconds": done.cpu_seconds, **counts}


FIGURES: dict[str, Callable[[Workspace], tuple[list[str], Values]]] = {
    "downloads": downloads,
    "further-torch": further_torch,
    "nothing-changed": nothing_changed,
    "one-source": one_source,
    "warm-cache": warm_cache,
    "load-time": load_time,
    "triton": triton,
}


@click.command()
@click.option("--only", type=click.Choice(list(FIGURES)), multiple=True, help="Only this figure; may be repeated.")
@click.option("--json", "file", type=click.Path(path_type=Path), default=FILE, help="Add the results to this file.")
def main(only: tuple[str, ...], file: Path) -> None:
    """Measure figures of the builder and record them in a JSON file, which keeps the other figures."""
    recorded = json.loads(file.read_text())["figures"] if file.exists() else {}
    on = machine("torch", "kernels")
    with tempfile.TemporaryDirectory(prefix="kernel-builder-figures-") as directory:
        workspace = Workspace(Path(directory).resolve())
        for name in only or FIGURES:
            load = os.getloadavg()[0]
            commands, values = FIGURES[name](workspace)
            recorded[name] = {
                "commands": commands,
                "values": values,
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "commit": commit(),
                "cores": on["cores"],
                "load": [load, os.getloadavg()[0]],
            }
            click.echo(f"{name}: {json.dumps(values)}")
            ordered = {name: recorded[name] for name in FIGURES if name in recorded}
            write(file, {"machine": on, "figures": ordered})


if __name__ == "__main__":
    main()
