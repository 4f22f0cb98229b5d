"""Runs kernel-builder on copies of projects, with caches of their own, and measures each run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from figures import ROOT, children_cpu_seconds

from kernel_builder.toolchain import Toolchains

BUILDER = Path(sys.executable).with_name("kernel-builder")
JOBS = 2

# A step's line on stderr. A compile's title ends with its backend.
_STEP = re.compile(r"^\[\d+/\d+\] (link .*|.* \(\w+(?: [\d.]+)?\))$", re.MULTILINE)


def steps_of(output: str) -> tuple[str, ...]:
    """Return the titles of the compile and link steps that a build names on stderr."""
    return tuple(_STEP.findall(output))


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
    steps: tuple[str, ...]


class Workspace:
    """A temporary directory with copies of projects, caches, and builds that several figures use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._originals = root / "originals"
        ignore = shutil.ignore_patterns("build", "__pycache__")
        shutil.copytree(ROOT / "kernels" / "rmsnorm", self._originals / "rmsnorm", ignore=ignore)
        shutil.copytree(ROOT / "tests" / "projects" / "full-scale", self._originals / "full-scale", ignore=ignore)

    def project(self, place: str, name: str = "rmsnorm") -> Path:
        """Copy a project, without its `build` directory, to `place/name`."""
        return Path(shutil.copytree(self._originals / name, self.root / place / name))

    def cache(self, name: str) -> Path:
        """Make a cache without compiled objects that shares the user's downloaded toolchains."""
        cache = self.root / "caches" / name
        cache.mkdir(parents=True)
        shared = Toolchains().store.root
        shared.mkdir(parents=True, exist_ok=True)
        (cache / "toolchains").symlink_to(shared, target_is_directory=True)
        return cache

    def run(self, cache: Path, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> CompletedRun:
        """Run `kernel-builder` with these arguments.

        Raises:
            RuntimeError: If it fails; the text has its output.
        """
        command = list(map(str, arguments))
        env = {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **(environment or {})}
        before, started = children_cpu_seconds(), time.perf_counter()
        done = subprocess.run([str(BUILDER), *command], capture_output=True, text=True, check=False, env=env)
        seconds, cpu_seconds = time.perf_counter() - started, children_cpu_seconds() - before
        shown = shlex.join(["kernel-builder", *command]).replace(f"{self.root}/", "")
        if done.returncode:
            raise RuntimeError(f"{shown}\n{done.stdout}{done.stderr}")
        result = json.loads(done.stdout) if "--json" in command else None
        return CompletedRun(shown.removesuffix(" --json"), seconds, cpu_seconds, result, steps_of(done.stderr))

    def build(
        self,
        cache: Path,
        project: Path,
        *options: str,
        jobs: int = JOBS,
        environment: Mapping[str, str] | None = None,
    ) -> CompletedRun:
        """Run `kernel-builder build`.

        Raises:
            RuntimeError: If it fails, or if its steps cannot be read from its output.
        """
        fixed = ["--jobs", str(jobs), "--json"]
        done = self.run(cache, "build", project, *options, *fixed, environment=environment)
        if len(done.steps) != done.result["steps"]:
            raise RuntimeError(f"{done.command}: ran {done.result['steps']} steps, its output has {done.steps}")
        return done

    @cached_property
    def first_build(self) -> tuple[Path, Path, CompletedRun]:
        """A project, its cache, and the cold build of the variants that the Hub asks for."""
        project, cache = self.project("cold"), self.cache("cold")
        return project, cache, self.build(cache, project)

    @cached_property
    def matrix_build(self) -> tuple[Path, CompletedRun]:
        """A project and the cold build of its whole matrix, for every platform."""
        project = self.project("whole")
        return project, self.build(self.cache("whole"), project, "--all", "--platform", "all", "--no-load")
