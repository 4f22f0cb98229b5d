"""Runs the tests of a project on this machine's hardware, and reports hardware, versions and results as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kernel_builder import pipeline
from kernel_builder.config.project import Project
from kernel_builder.config.variant import Variant
from kernel_builder.develop import choice, interpreter, shells
from kernel_builder.progress import Progress
from kernel_builder.steps import buildable
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError
from kernel_format.metadata import PackageMetadata

_MAX_OUTPUT = 4000  # characters of a failed test's output in the report

# Run by the tests' interpreter, which may not be this one.
_MACHINE = """
import json, platform, torch
about = {"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}
about |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "devices": []}
for number in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(number)
    about["devices"].append({
        "name": device.name,
        "arch": getattr(device, "gcnArchName", None) or f"{device.major}.{device.minor}",
        "warp": getattr(device, "warp_size", None),
        "memory": device.total_memory,
    })
print(json.dumps(about))
"""


def run(
    project: Project,
    name: str | None,
    toolchains: Toolchains,
    progress: Progress,
    *,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Build a variant if its sources have changed, run the project's tests with it, and return the report.

    Args:
        name: The variant. None: the variant for this machine's hardware, and for the installed Torch if it loads one.
        arguments: More arguments for pytest.

    Raises:
        KernelBuilderError: If the variant cannot be built, there are no tests, or no Torch for it can be installed.
    """
    tests = project.root / "tests"
    if not tests.is_dir():
        raise ConfigError("the project has no directory of tests", where=str(tests), hint="add pytest tests there")
    variant = _chosen(project, name, toolchains)
    progress.say(f"building {variant.name}")
    pipeline.build(pipeline.BuildRequest((project.root,), (variant.name,)), toolchains, progress).raise_error()
    python = interpreter.find(project, variant, toolchains.cache, progress)
    environment = shells.testing(project, variant, python)
    machine = subprocess.run(
        [str(python), "-c", _MACHINE], env=environment, capture_output=True, text=True, check=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *arguments]
        progress.say(f"running {tests}")
        done = subprocess.run([*command, str(tests)], env=environment, stdout=sys.stderr, check=False)
        outcome = summarized(results.read_text(encoding="utf-8")) if results.is_file() else {}
    metadata = PackageMetadata.read(project.root / "build" / variant.name)
    return {
        "project": project.name,
        "version": project.version,
        "variant": variant.name,
        "package": metadata.to_dict() if metadata else None,
        "machine": json.loads(machine.stdout) if machine.returncode == 0 else {"error": machine.stderr[-_MAX_OUTPUT:]},
        "status": done.returncode,
        "tests": outcome,
    }


def _chosen(project: Project, name: str | None, toolchains: Toolchains) -> Variant:
    if name:
        return choice.to_develop(project, name, toolchains)
    variants, _ = buildable.available(project, toolchains)
    at_hand = [variant for variant in variants if variant.backend.is_present()]
    return choice.newest(choice.loadable(at_hand) or at_hand or variants)


def summarized(results: str) -> dict[str, Any]:
    """Summarize pytest's XML: the number of tests by outcome, the time, and the output of failed tests."""
    cases = list(ElementTree.fromstring(results).iter("testcase"))  # written by the pytest that was run
    outcomes = [(case, [*case.iter("failure"), *case.iter("error")]) for case in cases]
    failed = [(case, failures) for case, failures in outcomes if failures]
    skipped = [element for case in cases for element in case.iter("skipped")]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
        "failures": [
            {"test": f"{case.get('classname')}::{case.get('name')}", "output": (failure.text or "")[-_MAX_OUTPUT:]}
            for case, failures in failed
            for failure in failures
        ],
    }
