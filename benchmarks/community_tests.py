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
    parser.epilog = "Arguments after `--` are pytest's."
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.pytest = words[end + 1 :]
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
    """Run one project's tests with the package that fits this machine.

    Tests may use what earlier tests of the file have imported. If tests fail in parallel, all run again in one process,
    where the time allows it.
    """
    package = _fitting(packages)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), str(root), os.environ.get("PYTHONPATH", "")]),
        "LOCAL_KERNELS": f"{_repository(root)}={packages}",
        "HF_HUB_OFFLINE": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX would take most of the GPU's memory in each process
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode would change the package
    }
    started = time.monotonic()
    outcome = _pytest(root, environment, arguments, arguments.workers, arguments.timeout)
    left = arguments.timeout - (time.monotonic() - started)
    if outcome["failures"] and arguments.workers != "0" and outcome["status"] == 1 and outcome["test-seconds"] < left:
        again = _pytest(root, environment, arguments, "0", left)
        if again["status"] in (0, 1):
            outcome = {**again, "parallel": outcome["counts"]}
    return {"variant": package.name, **outcome, "seconds": round(time.monotonic() - started)}


def _fitting(packages: Path) -> Path:
    """Return the package for this machine's GPU: the client's own choice, if it tells; a CPU package without a GPU."""
    import torch

    paths = sorted(path for path in packages.iterdir() if (path / "metadata.json").is_file())
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    fitting = [path for path in paths if json.loads((path / "metadata.json").read_text())["backend"]["type"] == backend]
    try:
        from kernels.variants import parse_variant, resolve_variants

        accepted, _ = resolve_variants([parse_variant(path.name) for path in fitting], backend)
        names = [variant.variant_str for variant in accepted]
        fitting.sort(key=lambda path: names.index(path.name) if path.name in names else len(names))
    except (ImportError, AttributeError):
        pass  # another release of the client
    return next(iter(fitting or paths))


def _repository(root: Path) -> str:
    """Return the repository that `build.toml` names."""
    match = re.search(r'^repo-id *= *"([^"]+)"', (root / "build.toml").read_text(), re.M)
    return match[1] if match else f"kernels-community/{root.name}"


def _pytest(
    root: Path, environment: dict[str, str], arguments: argparse.Namespace, workers: str, seconds: float
) -> dict[str, Any]:
    """Run pytest once, and return its status and the outcomes of the tests."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-n", workers, f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", f"--basetemp={scratch}/tmp", *arguments.pytest]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            status, words = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            status, words = 124, (error.stdout or b"").decode(errors="replace")
        counts, failures, tests = _read(report) if report.exists() else ({}, {}, 0.0)
    return {
        "status": status,
        "test-seconds": round(tests, 1),
        "counts": counts,
        "failures": failures,
        "words": "" if counts else words[-1500:],
    }


def _read(report: Path) -> tuple[dict[str, int], dict[str, int], float]:
    """Return how many tests had each outcome, how often each message of a failure occurs, and the tests' seconds."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    seconds = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        seconds += float(case.get("time", 0))
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        counts["passed" if outcome is None else outcome.tag] += 1
        if outcome is not None and outcome.tag != "skipped":
            message = (outcome.get("message") or outcome.text or "").strip().partition("\n")[0]
            failures[re.sub(r"\d+(\.\d+)?(e-?\d+)?|0x[0-9a-f]+", "#", message)] += 1
    return dict(counts), dict(failures.most_common(_MESSAGES)), seconds


if __name__ == "__main__":
    main()
