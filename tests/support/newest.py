"""The newest Torch releases of the matrix, so that tests need no edit when it gets another one."""

from __future__ import annotations

from kernel_builder.backends.cuda import CUDA
from kernel_builder.config import matrix
from kernel_builder.config.variant import Release

BEFORE, NEWEST = matrix.load().torch[-2:]
LAST_FOR_CUDA_12 = max(torch for torch, cuda in CUDA.published().items() if cuda[0] and cuda[0].major == 12)


def full_abi(release: Release, backend: str, platform: str = "x86_64-linux") -> str:
    """Return the name of a variant on the full C++ ABI, such as `torch215-cxx11-cu130-x86_64-linux`."""
    return f"torch{release.major}{release.minor}-cxx11-{backend}-{platform}"


def cuda_backends(release: Release) -> tuple[str, ...]:
    """Return the CUDA releases that a Torch release is published for, as variants name them, ascending."""
    return tuple(map(CUDA.spelled, CUDA.published()[release]))


# A CUDA release that both have.
CUDA_13 = next(name for name in cuda_backends(NEWEST) if name in cuda_backends(BEFORE))
