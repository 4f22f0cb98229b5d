"""The report of ptxas is read whole, and occupancy is what registers, shared memory and the block size allow."""

from __future__ import annotations

import pytest

from kernel_builder.backends.cuda.ptxas_report import KernelResources, read

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_100a'
ptxas info    : Function properties for helper
    64 bytes stack frame, 60 bytes spill stores, 60 bytes spill loads
ptxas info    : Function properties for _Z1aPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 2048 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_86'
ptxas info    : Function properties for _Z1bPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 384 bytes cmem[0]
"""


def test_the_report_of_ptxas_is_read() -> None:
    assert list(read(REPORT)) == [
        KernelResources("_Z1aPf", "10.0a", 40, 16, 8, 12, 2048),
        KernelResources("_Z1bPf", "8.6", 255, 0, 0, 0, 0),
    ]


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "shares"),
    [
        ("9.0", 32, 0, [1.0, 1.0, 1.0, 1.0]),
        ("9.0a", 64, 0, [0.5, 0.5, 0.5, 0.5]),
        ("9.0", 65, 0, [0.4375, 0.375, 0.25, 0.0]),
        ("9.0", 255, 0, [0.125, 0.125, 0.0, 0.0]),
        ("8.6", 40, 0, [1.0, 1.0, 1.0, 0.6667]),
        ("9.0", 32, 48 * 1024, [0.25, 0.5, 1.0, 1.0]),
        ("7.5", 32, 0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_occupancy(capability: str, registers: int, shared: int, shares: list[float]) -> None:
    kernel = KernelResources("k", capability, registers, 0, 0, 0, shared)
    assert list(kernel.as_dict()["occupancy"].values()) == shares


def test_occupancy_of_an_unknown_capability() -> None:
    assert KernelResources("k", "99.0", 32, 0, 0, 0, 0).as_dict()["occupancy"] is None
