"""Runs the tests that public kernel projects bring, on a GPU, against packages that this builder built.

    python benchmarks/community_tests.py kernels-community --packages community-build --json tests.json

It needs Torch, pytest and the public `kernels` client, and not the builder, so that it runs on a bare GPU machine. The
tests find the package as they do in the public test shell: by its Python name on PYTHONPATH, and by its repository
through LOCAL_KERNELS.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_MESSAGES = 12  # distinct failures that the results keep


def main() -> None:
    """Run the tests of each project that has a package, and write the counts of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="The repository of kernel projects.")
    parser.add_argument("--packages", type=Path, required=True, help="PACKAGES/<project>/<variant>/ are packages.")
    parser.add_argument("--json", type=Path, required=True, help="Write the results to this file.")
    parser.add_argument("--project", action="append", help="Only this project; may be repeated.")
    parser.add_argument("--workers", default="8", help="Tests that run at a time. [default: 8]")
    parser.add_argument("--timeout", type=float, default=240, help="Seconds for one project. [default: 240]")
    parser.add_argument("pytest", nargs="*", help="More arguments for pytest, after `--`.")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"torch": _torch(), "projects": {}}
    for packages in sorted(path for path in arguments.packages.iterdir() if path.is_dir()):
        if arguments.project and packages.name not in arguments.project:
            continue
        root = arguments.directory / packages.name
        if not (root / "tests").is_dir():
            continue
        outcome = _run(root.resolve(), packages.resolve(), arguments)
        results["projects"][packages.name] = outcome
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        print(packages.name, outcome["counts"], f"{outcome['seconds']} s", flush=True)
        for message, times in outcome["failures"].items():
            print(f"    {times} x {message[:200]}", flush=True)


def _torch() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{torch.__version__}, {name}"


def _run(root: Path, packages: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one project's tests with the package that fits this machine's GPU."""
    package = next(path for path in sorted(packages.iterdir()) if "-cu" in path.name)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), str(root), os.environ.get("PYTHONPATH", "")]),
        "LOCAL_KERNELS": f"kernels-community/{root.name}={packages}",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-n", arguments.workers, f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", f"--basetemp={scratch}/tmp", *arguments.pytest]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=arguments.timeout,
                check=False,
            )
            status, words = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            status, words = 124, (error.stdout or b"").decode(errors="replace")
        counts, failures = _read(report) if report.exists() else ({}, {})
    return {
        "variant": package.name,
        "status": status,
        "seconds": round(time.monotonic() - started),
        "counts": counts,
        "failures": failures,
        "words": "" if counts else words[-1500:],
    }


def _read(report: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many tests had each outcome, and how often each message of a failure occurs."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        counts["passed" if outcome is None else outcome.tag] += 1
        if outcome is not None and outcome.tag != "skipped":
            message = (outcome.get("message") or outcome.text or "").strip().partition("\n")[0]
            failures[re.sub(r"\d+(\.\d+)?(e-?\d+)?|0x[0-9a-f]+", "#", message)] += 1
    return dict(counts), dict(failures.most_common(_MESSAGES))


if __name__ == "__main__":
    main()
