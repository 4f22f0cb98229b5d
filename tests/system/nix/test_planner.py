"""The part of the builder that Nix's compile steps get: every module that its modules import is in it.

The tests in tests/nix build with it, and take minutes; this one needs no Nix.
"""

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
sys.path.insert(0, sys.argv[1])
import kernel_builder
assert kernel_builder.__file__.startswith(sys.argv[1])
for module in pkgutil.walk_packages(kernel_builder.__path__, "kernel_builder."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_the_part_of_the_builder_in_compile_steps_is_complete(tmp_path: Path) -> None:
    text = (ROOT / "nix" / "steps.nix").read_text()
    match = re.search(r'planner = withBytecode "kernel-builder-plan"[^[]*\[([^]]*)\]', text)
    assert match
    copied = {f"kernel_builder/{name}": ROOT / "kernel_builder" / name for name in re.findall(r'"([^"]+)"', match[1])}
    copied["kernel_builder/toolchain"] = ROOT / "kernel_builder/toolchain"
    copied["kernel_format"] = ROOT / "packages/kernel-format/kernel_format"
    copied["kernel_sandbox"] = ROOT / "packages/kernel-sandbox/kernel_sandbox"
    for name, source in copied.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"kernel_builder.nix", "kernel_builder.steps.plan"} <= set(done.stdout.split())
