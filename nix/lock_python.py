"""Write nix/python.json: the wheels of the Python packages that the flake uses, pinned by hash.

    python nix/lock_python.py
    python nix/lock_python.py --if-newer kernels huggingface_hub     # writes if one of these has another version

`builder` are the dependencies of the builder. `torch` is Torch with the dependencies of kernel tests, for a nixpkgs
whose Torch is too old. pip resolves both for each Python and platform. New versions of the packages that `--if-newer`
names are printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import tomllib

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
# The builder, and the distributions of this repository that it depends on.
OWN = (".", "packages/kernel-format", "packages/kernel-sandbox", "packages/kernel-aot", "packages/kernel-emulator")
MACHINES = ("x86_64", "aarch64")
TORCH = ("torch==2.10.0", "numpy>=2", "pytest>=8.4")
GLIBCS = ("2_35", "2_34", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")


def resolve(python: str, machine: str, requirements: list[str]) -> dict[str, str]:
    """Return the wheels that the requirements need: file name -> SHA-256."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in GLIBCS]
    platforms += [f"--platform=manylinux2014_{machine}", f"--platform=manylinux2010_{machine}"]
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--report=-"]
        command += ["--ignore-installed", "--only-binary=:all:", f"--python-version={python}", *platforms]
        done = subprocess.run([*command, "--target", target, *requirements], check=True, capture_output=True, text=True)
    downloads = [item["download_info"] for item in json.loads(done.stdout)["install"]]
    return {
        PurePosixPath(unquote(urlsplit(item["url"]).path)).name: item["archive_info"]["hashes"]["sha256"]
        for item in downloads
    }


def dependencies() -> list[str]:
    """Return the dependencies of the builder and of the distributions that it depends on, which the flake contains."""
    listed = []
    for directory in OWN:
        project = tomllib.loads((HERE.parent / directory / "pyproject.toml").read_text())["project"]
        listed += [text for text in project["dependencies"] if not text.startswith("torch-kernel-")]
    return listed


def versions(wheels: Iterable[str], project: str) -> set[str]:
    """Return the versions of a project among the names of wheels."""
    return {name.split("-")[1] for name in wheels if name.split("-")[0] == project}


def newer(old: Iterable[str], new: Iterable[str], projects: Iterable[str]) -> list[str]:
    """Return a line for each project of which wheels of other versions are pinned."""
    both = {project: [", ".join(sorted(versions(names, project))) for names in (old, new)] for project in projects}
    return [f"- {project}: {before} → {now}" for project, (before, now) in both.items() if before != now]


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin the wheels of the Python packages that the flake uses.")
    parser.add_argument("--if-newer", nargs="+", metavar="PROJECT", help="write only if one of these has a new version")
    projects = parser.parse_args().if_newer
    wheels: dict[str, str] = {}
    needed: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, requirements in {"builder": dependencies(), "torch": list(TORCH)}.items():
        for python in PYTHONS:
            for machine in MACHINES:
                resolved = resolve(python, machine, requirements)
                wheels.update(resolved)
                needed.setdefault(name, {}).setdefault(python, {})[f"{machine}-linux"] = sorted(resolved)
                print(f"{name}, Python {python}, {machine}: {len(resolved)} wheels", file=sys.stderr)
    if projects:
        lines = newer(json.loads((HERE / "python.json").read_text())["wheels"], wheels, projects)
        if not lines:
            return
        print("\n".join(lines))
    text = json.dumps({"wheels": dict(sorted(wheels.items())), "needed": needed}, indent=1)
    (HERE / "python.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
