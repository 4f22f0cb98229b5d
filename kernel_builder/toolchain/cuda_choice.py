"""Which compiler makes the variants of a CUDA release: the user's nvcc, a pinned nvcc, or clang."""

from __future__ import annotations

from kernel_builder.backends.cuda import CudaToolkit
from kernel_builder.config.variant import PLATFORMS, Release, this_platform
from kernel_builder.plural import listed
from kernel_builder.toolchain.lock import ClangPin, Lock
from kernel_builder.toolchain.tools import CudaCompiler, Obstacle


def clang_for(
    lock: Lock, system: CudaToolkit | None, release: Release, platform: str, choice: CudaCompiler | None
) -> ClangPin | None:
    """Return clang if it is what compiles for a CUDA release, or None.

    Without a choice, nvcc goes first where there is one. clang compiles with one release of CUDA for all minor releases
    of that major, and on request for later majors: its binaries use what the runtimes of all of them have.

    Args:
        system: The toolkit that the user named.
    """
    pinned = lock.clang
    if pinned is None or platform not in pinned.platforms or choice == "nvcc":
        return None
    major = pinned.cuda.release.major
    if choice == "clang":
        return pinned if release.major >= major else None
    has_nvcc = release in lock.cuda or (system is not None and system.release == release)
    return pinned if release.major == major and not has_nvcc else None


def obstacle(lock: Lock, system: CudaToolkit | None, release: Release, choice: CudaCompiler | None) -> Obstacle | None:
    """Return why a CUDA release cannot be had on this machine, or None if it can."""
    platform = this_platform()
    if clang_for(lock, system, release, platform, choice):
        return None
    if choice == "clang":
        oldest = f" for CUDA {lock.clang.cuda.release.major} and later" if lock.clang else ""
        return Obstacle(
            f"needs CUDA {release}; clang compiles{oldest} on {' and '.join(PLATFORMS)}",
            "leave out `--cuda-compiler clang`",
        )
    has_nvcc = release in lock.cuda and platform in lock.cuda[release].platforms
    if has_nvcc or (system is not None and system.release == release):
        return None
    releases = [pinned for pinned, cuda in lock.cuda.items() if platform in cuda.platforms]
    hint = ""
    if lock.clang and choice is None:
        releases.append(lock.clang.cuda.release)
    elif lock.clang and release.major == lock.clang.cuda.release.major:
        hint = "leave out `--cuda-compiler nvcc`, since clang compiles for it, or "
    has = f", and {system.root} is CUDA {system.release}" if system else ""
    return Obstacle(
        f"needs CUDA {release}; this builder has {listed(sorted(releases)) if releases else 'none'}{has}",
        f"{hint}install the CUDA toolkit {release} and name its directory, e.g. "
        f"`--cuda-home /usr/local/cuda-{release}`",
    )
