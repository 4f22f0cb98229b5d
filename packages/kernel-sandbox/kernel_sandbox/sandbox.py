"""Sandboxes: bubblewrap where it is installed and may be used, else Landlock, else a plain process.

Each of them takes away the network where the system permits it, the sight of other processes' memory, and writing
outside a scratch directory. `confine.py` runs in the processes, and `system_calls.py` refuses system
calls.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kernel_sandbox.confine import BUBBLEWRAP, INSIDE, LANDLOCK, PROCESS, gpu_devices, has_seccomp, landlock_version
from kernel_sandbox.programs import find_program, run_program
from kernel_sandbox.system_calls import seccomp_filter, seccomp_filters

# Of /etc only these: the rest has passwords and keys, which root's processes could read.
_ETC = ["alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "passwd", "group", "nsswitch.conf", "os-release"]
_ETC += ["localtime", "ssl/openssl.cnf", "pki/tls/openssl.cnf", "crypto-policies"]
_ETC += [path.name for path in Path("/etc").glob("python3*")]
_SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/sys", "/nix/store"]
_SYSTEM += [f"/etc/{name}" for name in _ETC]

_CONFINE = Path(__file__).with_name("confine.py")

# Variables that programs need. Others may hold secrets.
_KEPT = {"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CC", "CXX"}
# Without these a compiler that is not installed in the system's directories does not find its parts.
_KEPT |= {"CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"}
_KEPT |= {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS"}
_KEPT |= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "TORCH_CUDA_ARCH_LIST"}
_KEPT |= {"TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH"}
# The compilers of Nix read these, whose names may end in a platform.
_KEPT_PREFIXES = ("NIX_CFLAGS_", "NIX_LDFLAGS", "NIX_CC_", "NIX_BINTOOLS_", "NIX_HARDENING_ENABLE", "NIX_LD")


def readable(more: Iterable[Path]) -> list[str]:
    """Return the paths that a process may read: the system, Python with its packages, and `more`.

    The user's home and its parents, and the current directory, are not among them, though programs are started there:
    `python -m` adds it to the paths. Neither are paths that the user may not look up, such as one of root's on PATH.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111  # `Path.home` needs a passwd entry
    directories = [sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.realpath(path) != os.getcwd())]  # noqa: PTH109
    directories += [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *map(str, more)]
    directories = [os.path.abspath(path) for path in directories if not home.is_relative_to(os.path.realpath(path))]  # noqa: PTH100
    both = [path for directory in (*_SYSTEM, *directories) for path in (directory, os.path.realpath(directory))]
    return list(dict.fromkeys(path for path in both if os.path.exists(path)))  # noqa: PTH110  # `Path` raises


def environment(scratch: Path) -> dict[str, str]:
    """Return this process's environment without possible secrets; its home is the scratch directory."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "XDG_CACHE_HOME": f"{scratch}/.cache", "HF_HUB_OFFLINE": "1"}
    return {**kept, **own}


def wrapped(command: Sequence[str], kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return a command that runs in a sandbox: it may read `paths`, and write `scratch`, where it starts."""
    if kind == BUBBLEWRAP and device != "cpu":
        words = prefix(kind, scratch, [*paths, str(_CONFINE)], device)
        return [*words, *_program(INSIDE, scratch, paths, device), *command]
    if kind == BUBBLEWRAP:
        # With a first process of bubblewrap's own, bubblewrap would end before all of the others have.
        return [*prefix(kind, scratch, paths, device), "--as-pid-1", "sh", "-c", '"$@"; exit $?', "sh", *command]
    return [*_program(kind, scratch, paths, device), *command]


def _program(kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return the words of the program that confines itself, before the command that it becomes."""
    read = [] if kind == BUBBLEWRAP else paths
    filtered = ",".join(program.hex() for program in seccomp_filters(device))
    return [sys.executable, "-I", "-S", str(_CONFINE), kind, device, str(scratch), filtered, *read, "--"]


@functools.cache
def strongest() -> str:
    """Return the name of the strongest sandbox that this system permits."""
    if missing_filter() is not None:
        return PROCESS
    if find_program("bwrap"):
        with TemporaryDirectory() as scratch, suppress(OSError, subprocess.SubprocessError):
            trial = wrapped(["true"], BUBBLEWRAP, Path(scratch), readable([]), "cpu")
            if run_program(*trial, seconds=10).returncode == 0:
                return BUBBLEWRAP
    return LANDLOCK if landlock_version() > 0 else PROCESS


def missing_filter() -> str | None:
    """Return why system calls cannot be refused here; None if they can."""
    if not seccomp_filter("cpu"):
        return f"there is no filter of system calls for {os.uname().machine}"
    return None if has_seccomp() else "the kernel does not filter system calls (seccomp)"


def prefix(kind: str, scratch: Path, paths: Sequence[str], device: str) -> list[str]:
    """Return the words before a worker's command: those of bubblewrap, or none."""
    if kind != BUBBLEWRAP:
        return []
    # If bubblewrap is killed while it starts, its child may sleep for ever:
    # https://github.com/containers/bubblewrap/issues/633. On the CPU, bubblewrap is the first process of a pid
    # namespace, with which the child ends.
    words = [*_program(kind, scratch, paths, device), find_program("bwrap") or "bwrap"]
    words += ["--die-with-parent", "--unshare-user", "--unshare-net", "--unshare-uts", "--cap-drop", "ALL"]
    # Root's processes are root for /proc/sys in a user namespace as well: core_pattern names a program outside.
    words += ["--dev", "/dev", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    if device == "cpu":  # files in /dev/shm would take memory without a limit
        words += ["--unshare-pid", "--unshare-ipc", "--remount-ro", "/proc", "--remount-ro", "/dev"]
    else:  # handles of GPU memory work between processes of one pid namespace only
        words += [word for path in gpu_devices() for word in ("--dev-bind", path, path)]
    for path in _outermost(paths):
        link = Path(path).is_symlink()
        words += ["--symlink", str(Path(path).readlink()), path] if link else ["--ro-bind", path, path]
    # The rest is the root, a file system in memory.
    return [*words, "--bind", str(scratch), str(scratch), "--remount-ro", "/", "--chdir", str(scratch)]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not inside another one. Paths inside a link, such as a linked venv, are real paths."""
    links = [path for path in paths if Path(path).is_symlink()]
    inside = {path for path in paths for link in links if path != link and Path(path).is_relative_to(link)}
    outermost: list[str] = []
    for path in sorted({os.path.realpath(path) if path in inside else path for path in paths}, key=len):
        if not any(Path(path).is_relative_to(outer) for outer in outermost):
            outermost.append(path)
    return outermost
