"""Makes a Python for aarch64 with Torch, the client and pytest, which runs by qemu-user on x86_64.

    python -m tests.support.emulated_python DIR

`DIR/python` is then a program that starts it. The interpreter and its libraries are packages of Debian or Ubuntu, which
are unpacked and not installed; the rest are wheels. About 180 MB are downloaded, and 1 GB is written.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

EMULATOR = "qemu-aarch64-static"
_NEEDED = {EMULATOR: "qemu-user-static", "apt-get": "apt", "dpkg-deb": "dpkg"}
# Its wheel for aarch64 is for the CPU and the smallest of those that the kernels support.
TORCH = "torch==2.10.0"
_PLATFORM = "aarch64-manylinux_2_28"
# Ubuntu keeps other platforms than x86_64 at a place of their own.
_UBUNTU = "deb http://ports.ubuntu.com/ubuntu-ports {release} main universe\n"


def obstacle() -> str | None:
    """Return why no such Python can be made on this machine, or None."""
    missing = [package for program, package in _NEEDED.items() if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def make(directory: Path) -> Path:
    """Make the Python, unless it is there, and return the program that starts it."""
    program = directory / "python"
    if program.exists():
        return program
    shutil.rmtree(directory, ignore_errors=True)
    root, site = directory / "root", directory / "site"
    root.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for package in _packages(Path(scratch)):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    if not (root / "lib").exists():  # newer releases have all in usr/lib, and this link in a package of its own
        (root / "lib").symlink_to("usr/lib")
    interpreter = next(path for path in sorted(root.glob("usr/bin/python3.*")) if path.suffix[1:].isdigit())
    _install(site, interpreter.name.removeprefix("python"))
    emulated = shlex.join([EMULATOR, "-L", str(root), str(interpreter)])
    new = directory / "python.new"
    new.write_text(f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(site))} OMP_NUM_THREADS=1\nexec {emulated} "$@"\n')
    new.chmod(0o755)
    # Torch takes 20 s to import by emulation: that is left to the test.
    subprocess.run([new, "-c", "import numpy"], check=True)
    return new.rename(program)


def _packages(scratch: Path) -> list[Path]:
    """Download the packages of Python 3 for arm64, with their dependencies, without a change to the machine's apt."""
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
    }
    system = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if system.get("ID") == "ubuntu":
        (scratch / "sources.list").write_text(_UBUNTU.format(release=system["VERSION_CODENAME"]))
        options |= {"Dir::Etc::sourcelist": scratch / "sources.list", "Dir::Etc::sourceparts": scratch / "sources"}
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    wanted = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]
    subprocess.run([*apt, "--yes", "--no-install-recommends", "--download-only", "install", *wanted], check=True)
    return sorted((scratch / "cache/archives").glob("*.deb"))


def _install(site: Path, version: str) -> None:
    """Install wheels for aarch64, with their dependencies there: pip would judge that by this machine."""
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
    uv += ["--target", site, "--only-binary=:all:", f"--python-version={version}", f"--python-platform={_PLATFORM}"]
    subprocess.run([*uv, TORCH, f"kernels=={metadata.version('kernels')}", "numpy", "pytest"], check=True)


if __name__ == "__main__":
    if reason := obstacle():
        print(f"no Python for aarch64: {reason}", file=sys.stderr)
    else:
        print(make(Path(os.path.abspath(sys.argv[1]))))  # noqa: PTH100  # links stay as they are given
