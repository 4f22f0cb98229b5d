"""Fixtures: a real Nix with its own store, and this repository as a flake on the stand-in for nixpkgs in `nixpkgs/`."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernel_format.files import locked, write_atomically
from tests.support.git import commit_all, git
from tests.support.optimization import without_optimization
from tests.support.places import ROOT, SOURCES
from tests.support.programs import run

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def _certificates() -> str:
    return (
        os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    )


@dataclass(frozen=True)
class Nix:
    """Nix in the directory of a flake."""

    root: Path  # of the store and the flakes; all processes of a run share it, so that each step is built once
    environment: dict[str, str]  # for commands that run Nix themselves

    def run(self, flake: Path, *arguments: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `nix ARGUMENTS` in `flake`, which fails if not `ok`."""
        command = ["nix", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=flake, capture_output=True, text=True, check=False, env=self.environment, timeout=1800
        )
        assert (done.returncode == 0) == ok, done.stderr
        return done

    def build(self, flake: Path, attribute: str) -> Path:
        """Build a package of the flake, and return its path."""
        done = self.run(flake, "build", f".#{attribute}", "--no-link", "--json", "--print-build-logs")
        return Path(json.loads(done.stdout)[0]["outputs"]["out"])

    def to_build(self, flake: Path, attribute: str) -> set[str]:
        """Return the names of the derivations that a build of a package would run."""
        done = self.run(flake, "build", f".#{attribute}", "--dry-run", "--no-link")
        lines = [line.strip() for line in done.stderr.splitlines()]
        return {Path(line).name.partition("-")[2].removesuffix(".drv") for line in lines if line.endswith(".drv")}

    def needs(self, flake: Path, attribute: str) -> set[str]:
        """Return the names of all derivations that a package is made of, also of those that are built."""
        done = self.run(flake, "path-info", "--derivation", "--recursive", f".#{attribute}")
        lines = [line for line in done.stdout.splitlines() if line.endswith(".drv")]
        return {Path(line).name.partition("-")[2].removesuffix(".drv") for line in lines}

    def eval(self, expression: str) -> object:
        """Return the value of an expression, which may read this repository's files."""
        command = ["nix-instantiate", "--eval", "--strict", "--json", "--expr", expression]
        return json.loads(run(*command, env=self.environment))


@pytest.fixture(scope="session")
def nix(tmp_path_factory: pytest.TempPathFactory) -> Nix:
    if shutil.which("nix") is None:
        pytest.skip("Nix is not installed: apt-get install nix-bin")
    if PYTHON not in json.loads((ROOT / "nix" / "python.json").read_text())["needed"]["builder"]:
        pytest.skip(f"the flake has no wheels for Python {PYTHON}, and nixpkgs' stand-in has no other")
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "nix"
    root.mkdir(exist_ok=True)
    # The sandbox, where the kernel allows one, sees the machine's tools: the stand-in for nixpkgs uses them.
    certificates = str(Path(_certificates()).parent)
    places = ["/bin", "/usr", "/lib", "/lib64", "/etc/alternatives", certificates, sys.prefix, sys.base_prefix]
    paths = " ".join(f"{place}={place}" for place in places if Path(place).exists())
    write_atomically(root / "nix.conf", SOURCES["nix_config"].format(paths=paths))
    return Nix(
        root,
        {
            **os.environ,
            "NIX_STORE_DIR": str(root / "store"),
            "NIX_STATE_DIR": str(root / "state"),
            "NIX_LOG_DIR": str(root / "log"),
            "NIX_CONF_DIR": str(root),
            "XDG_CACHE_HOME": str(root / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )


@pytest.fixture(scope="session")
def flake(nix: Nix) -> Path:
    """Commit a copy of the working tree, and pin it to the stand-in for nixpkgs.

    Tests build `geglu` for the CPU, without optimization, and `stable-scale` for CUDA, since that has less code.
    """
    copy, made = nix.root / "repository", nix.root / "made"
    with locked(nix.root / "lock"):
        if not made.exists():
            _make_flake(nix, copy)
            made.touch()
    return copy


def _make_flake(nix: Nix, copy: Path) -> None:
    nixpkgs = nix.root / "nixpkgs"
    shutil.copytree(Path(__file__).parent / "nixpkgs", nixpkgs)
    machine = {
        "python": sys._base_executable,  # type: ignore[attr-defined]
        "pythonVersion": PYTHON,
        "environment": sys.prefix,
        "torchVersion": torch.__version__,
        "certificates": _certificates(),
    }
    (nixpkgs / "machine.json").write_text(json.dumps(machine))
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    declaration = copy / "kernels" / "geglu" / "build.toml"
    declaration.write_text(without_optimization(declaration.read_text()))
    commit_all(copy)
    nix.run(copy, "flake", "lock", "--override-input", "nixpkgs", f"path:{nixpkgs}")
    commit_all(copy)
    _add_wheels(nix, copy)


def _add_wheels(nix: Nix, flake: Path) -> None:
    """Download the wheels of the builder's dependencies with one call of pip, and add them to the store.

    The flake would call pip once for each wheel. Nix does not run a fixed-output derivation whose output is in the
    store, so only the first wheel and the toolchains are fetched by the flake.
    """
    pinned = json.loads((flake / "nix" / "python.json").read_text())
    wheels = pinned["needed"]["builder"][PYTHON][f"{os.uname().machine}-linux"]
    lines = []
    for file in wheels[1:]:  # the flake fetches the first
        project, version, *_ = file.split("-")
        lines.append(f"{project}=={version} --hash=sha256:{pinned['wheels'][file]}\n")
    requirements, downloads = nix.root / "requirements.txt", nix.root / "wheels"
    requirements.write_text("".join(lines))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(downloads), "--requirement", str(requirements)], check=True)
    command = ["nix-store", "--add-fixed", "sha256", *map(str, downloads.iterdir())]
    subprocess.run(command, check=True, env=nix.environment, stdout=subprocess.DEVNULL)


@pytest.fixture
def kernel_flake(nix: Nix, flake: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a flake of a project, with the `flake.nix` that users write."""

    def make(project: Path, ignored: Sequence[str] = ("build", "__pycache__")) -> Path:
        target = tmp_path / project.name
        shutil.copytree(project, target, ignore=shutil.ignore_patterns(*ignored))
        (target / "flake.nix").write_text(
            f"""{{
  inputs.kernel-builder.url = "git+file://{flake}";
  outputs = {{ self, kernel-builder }}: kernel-builder.lib.genKernelFlakeOutputs {{ inherit self; path = ./.; }};
}}
"""
        )
        nix.run(target, "flake", "lock")
        return target

    return make
