"""Runs the public clients' own tests for kernels against this Hub.

    .venv/bin/python benchmarks/hub_client_suites.py --json benchmarks/results/hub-client-suites.json

The tests come from the clients' source distributions, unmodified but for the addresses of the public Hubs. They load
repositories of the public Hub; kernels of the same names and with the same functions, for the CPU, stand in for them.
The command needs a package index, and asks nothing else of the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import result_files
from hub_process import running_hub
from huggingface_hub import HfApi
from kernels_data import Digest, DigestAlgorithm

TRUSTED = ("kernels-community", "kernels-test")
SECONDS = 900

# pip asks a source distribution for its metadata, for which this back end needs Rust. This stands in for it.
_BACK_END = """
from pathlib import Path
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    described = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (Path(directory) / "x.dist-info").mkdir()
    (Path(directory) / "x.dist-info/METADATA").write_text(described)
    return "x.dist-info"
"""

_RELU = "import torch\ndef relu(x, out=None):\n    return torch.relu(x)\n"
_SILU = "import torch\ndef silu_and_mul(x):\n    a, b = x.chunk(2, -1)\n    return torch.nn.functional.silu(a) * b\n"
_LINEAR = (
    "import torch\nfrom . import layers\n",
    "import torch\nclass LinearBackward(torch.nn.Module):\n    has_backward = True\n    def forward(self, x):\n"
    "        return torch.nn.functional.linear(x, self.weight, self.bias)\n",
)


def _version(number: int) -> tuple[str, str]:
    code = f"from . import layers\ndef version():\n    return {number}\n"
    layer = f"import torch\nclass Version(torch.nn.Module):\n    def forward(self):\n        return {number}\n"
    return code, layer


# Repository -> branch -> the code of its package and of `layers`, and what else is special about it.
_KERNELS: Mapping[str, Mapping[str, tuple[tuple[str, str], Mapping[str, Any]]]] = {
    "kernels-community/relu": dict.fromkeys(("main", "v1"), ((_RELU, ""), {})),
    "kernels-community/activation": {"v1": ((_SILU, ""), {"variants": ["torch-cpu", "torch-cuda"]})},
    "kernels-test/versions": {
        "main": (_version(2), {}),
        **{f"v{number}": (_version(number), {}) for number in (1, 2, 10)},
    },
    "kernels-test/flattened-build": {"main": ((_SILU, ""), {})},
    "kernels-test/silu-and-mul": {"v1": ((_SILU, ""), {})},
    "kernels-test/backward-marker-test": {"main": (_LINEAR, {})},
    "kernels-test/python-invalid-dep": {"main": (("", ""), {"python-depends": ["kepler-22b"]})},
    "kernels-test/only-torch-2.4": {"main": ((_RELU, ""), {"variants": ["torch24-cxx11-cpu-x86_64-linux"]})},
    "kernels-test/no-compatible-build": {"v1": ((_SILU, ""), {"variants": ["torch24-cxx11-cu124-x86_64-linux"]})},
    "kernels-test/signatures": {
        "signature-missing": ((_RELU, ""), {}),
        "signature-broken": ((_RELU, ""), {"signature": "{}"}),
    },
    "kernels-test-untrusted/ci-test-kernel": {"v1": ((_RELU, ""), {})},
}

# Why tests fail, other than for a mistake of this Hub.
_REASONS = {
    "test_correctly_signed": "needs a signature by the publisher",
    "test_invalid_digest": "needs a signature by the publisher",
    "test_invalid_metadata": "needs a signature by the publisher",
    "test_missing_digest": "needs a signature by the publisher",
    "test_missing_metadata": "needs a signature by the publisher",
    "test_invalid_signature": "needs a signature by the publisher",
    "test_layer_locked": "names a commit of the public Hub",
    "test_func_locked": "names a commit of the public Hub",
    "test_download_all_hash_validation": "names a commit of the public Hub",
    "test_get_variants": "lists the variants of the public repository",
    "test_relu_load": "needs a binary of the public repository (tvm-ffi)",
    "test_relu_torch": "needs a binary of the public repository (tvm-ffi)",
    "test_local_load": "needs a binary of the public repository (tvm-ffi)",
    "test_missing_kernel_build_falls_back": "needs a GPU",
    **dict.fromkeys(
        (
            "test_install_kernel_offline",
            "test_hub_cache_resolver",
            "test_locked_hub_cache_resolver",
        ),
        "this huggingface_hub takes a snapshot of one variant for incomplete; the older one does not",
    ),
}
OLDER = "1.20.0"  # of huggingface_hub


def fetch(name: str, into: Path) -> Path:
    """Download the source distribution of an installed package, and return its directory."""
    (into / "maturin.py").write_text(_BACK_END.format(name=name, version=version(name)))
    wanted = f"{name}=={version(name)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    environment = {**os.environ, "PYTHONPATH": str(into)}
    subprocess.run(
        [*command, "--no-build-isolation", "--dest", str(into), wanted],
        env=environment,
        check=name == "kernels",  # pip has downloaded the other one before it misses its back end
        stderr=subprocess.DEVNULL,
    )
    (archive,) = into.glob(f"{name}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.gz")


def write_package(folder: Path, name: str, branch: str, code: tuple[str, str], special: Mapping[str, Any]) -> None:
    """Write the packages of one branch of a stand-in."""
    for variant in special.get("variants", ["torch-cpu"]):
        package = folder / "build" / variant
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(code[0])
        if code[1]:
            (package / "layers.py").write_text(code[1])
        backend = next(known for known in ("cuda", "cpu") if known in variant or (known == "cuda" and "cu1" in variant))
        described = {
            "id": f"_{name}_{branch}_{backend}".replace("-", "_").replace(".", "_"),
            "name": name,
            "version": int(branch[1:]) if branch[1:].isdigit() else 1,
            "license": "Apache-2.0",
            "python-depends": special.get("python-depends", []),
            "backend": {"type": backend},
            "digest": {
                "algorithm": "sha256",
                "files": dict(Digest.hash_variant(DigestAlgorithm.SHA256, package).files),
            },
        }
        (package / "metadata.json").write_text(json.dumps(described))
        if "signature" in special:
            (package / "metadata.json.sigstore").write_text(special["signature"])


def publish(api: HfApi, work: Path) -> None:
    """Publish all stand-ins."""
    for repo_id, branches in _KERNELS.items():
        api.create_repo(repo_id, repo_type="kernel")
        name = repo_id.partition("/")[2]
        for branch, (code, special) in branches.items():
            folder = work / repo_id / branch
            write_package(folder, name, branch, code, special)
            (folder / "benchmarks").mkdir()
            (folder / "benchmarks" / "benchmark.py").write_text(f"# {branch}\n")
            api.create_branch(repo_id, branch=branch, repo_type="kernel", exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type="kernel", revision=branch)


def install_older(into: Path) -> Path:
    """Install the older client beside the installed packages, and return its directory."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(into), f"huggingface_hub=={OLDER}"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return into


def run(directory: Path, tests: list[str], environment: Mapping[str, str], work: Path) -> dict[str, Any]:
    """Run tests, and return how many passed and were skipped, and which failed and why."""
    report = work / f"{directory.parent.name}-{directory.name}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    subprocess.run(
        command, cwd=directory, env={**os.environ, **environment}, check=False, timeout=SECONDS, stdout=sys.stderr
    )
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}}
    for case in ET.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in {"failure", "error", "skipped"}), None)
        if outcome is None:
            counts["passed"] += 1
        elif outcome.tag == "skipped":
            counts["skipped"] += 1
        else:
            name = str(case.get("name"))
            known = next((why for start, why in _REASONS.items() if name.startswith(start)), None)
            counts["failed"][f"{case.get('classname')}::{name}"] = known or str(outcome.get("message"))[:200]
    return counts


@click.command()
@click.option("--json", "report", type=click.Path(path_type=Path), help="Write the counts to this file.")
def main(report: Path | None) -> None:
    """Run both suites, and print how many of their tests pass."""
    with tempfile.TemporaryDirectory(prefix="kernel-builder-") as temporary:
        work = Path(temporary)
        hub_client = fetch("huggingface_hub", work)
        kernels_client = fetch("kernels", work) / "kernels"
        constants: dict[str, str] = {}
        exec((hub_client / "tests" / "testing_constants.py").read_text(), constants)
        known = [("root", "root", "*"), (constants["USER"], constants["TOKEN"], constants["USER"])]
        described = [
            {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": {scope: "write"}}
            for name, token, scope in known
        ]
        (work / "tokens.json").write_text(json.dumps({"tokens": described}))
        environment = {"HF_HOME": str(work / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        trusted = [option for name in TRUSTED for option in ("--trust", name)]
        with running_hub(work / "hub", "--token-file", str(work / "tokens.json"), *trusted, log=work / "log") as hub:
            publish(HfApi(endpoint=hub.url, token="root"), work / "published")
            for file in ("testing_constants.py", "test_kernels.py"):
                path = hub_client / "tests" / file
                text = path.read_text()
                for public in (constants["ENDPOINT_STAGING"], constants["ENDPOINT_PRODUCTION"]):
                    text = text.replace(public, hub.url)
                path.write_text(text)
            environment["HF_ENDPOINT"] = hub.url
            (hub_client / "tests" / "__init__.py").touch()
            # The doctest needs a package of its own, and no Hub.
            others = ["tests", "--ignore", "tests/test_doctest.py"]
            results = {
                f"huggingface_hub {version('huggingface_hub')}": run(
                    hub_client, ["tests/test_kernels.py"], environment, work
                ),
                f"kernels {version('kernels')}": run(kernels_client, others, environment, work),
                f"kernels {version('kernels')} with huggingface_hub {OLDER}": run(
                    kernels_client,
                    others,
                    {
                        **environment,
                        "HF_HOME": str(work / "older-home"),
                        "PYTHONPATH": str(install_older(work / "older")),
                    },
                    work,
                ),
            }
    click.echo(json.dumps(results, indent=1))
    if report is not None:
        result_files.write(report, results)


if __name__ == "__main__":
    main()
