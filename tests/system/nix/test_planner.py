"""The part of the builder in the compile steps of Nix has every module that it imports. Needs no Nix."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.places import ROOT

IMPORT_ALL = """
import importlib, pkgutil, sys
# The finder of an editable installation would find modules that the part lacks.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path[:0] = sys.argv[1:]
import kernel_builder
assert kernel_builder.__file__.startswith(sys.argv[1])
for module in pkgutil.walk_packages(kernel_builder.__path__, "kernel_builder."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_the_part_of_the_builder_in_compile_steps_is_complete(tmp_path: Path) -> None:
    text = (ROOT / "nix" / "steps.nix").read_text()
    names = re.search(r'planner = withBytecode "kernel-builder-plan"[^[]*\[([^]]*)\]', text)
    formats = re.search(r'\$\{format\}/\$\{name\}\.py"\) \[([^]]*)\]', text)
    assert names and formats
    parts = [f"kernel_builder/{name}" for name in [*re.findall(r'"([^"]+)"', names[1]), "toolchain"]]
    parts += [f"packages/kernel-format/kernel_format/{name}.py" for name in re.findall(r'"([^"]+)"', formats[1])]
    parts.append("packages/kernel-sandbox/kernel_sandbox")
    for part in parts:
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    path = [str(tmp_path / part) for part in ("", "packages/kernel-format", "packages/kernel-sandbox")]
    command = [sys.executable, "-c", IMPORT_ALL, *path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"kernel_builder.nix", "kernel_builder.steps.plan"} <= set(done.stdout.split())
