"""The report of `ptxas -v` for each kernel, and the occupancy that follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file

BLOCK_SIZES = (128, 256, 512, 1024)
"""Threads of a block that `occupancy` is given for: how a kernel is launched is not in its code."""

_WARP = 32
_REGISTERS, _PARTITIONS, _REGISTER_UNIT = 65536, 4, 256
_SHARED_UNIT = 128  # bytes
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\d+)(\d)([af]?)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?\b(\d+)(?:\+\d+)? bytes smem)?")


@dataclass(frozen=True)
class KernelResources:
    """The resources of a multiprocessor that one kernel uses.

    Attributes:
        kernel: Its mangled name.
        capability: The capability that it is compiled for, such as `9.0` or `9.0a`.
        registers: Of each thread.
        stack: Bytes of each thread's stack: arrays that are indexed by variables, and spilled registers.
        spill_stores, spill_loads: Bytes of instructions that store registers there, and load them.
        shared: Bytes of shared memory of a block, without the dynamic part of a launch.
    """

    kernel: str
    capability: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    def occupancy(self) -> dict[int, float] | None:
        """Return block size -> the share of the warps of a multiprocessor that can be resident.

        Shared memory that a launch adds is not counted. 0 where a block of this size cannot run. None for a capability
        whose limits are not known.
        """
        limits = _limits().get(self.capability.rstrip("af"))
        if limits is None:
            return None
        of_warp = _rounded_up(self.registers * _WARP, _REGISTER_UNIT)
        warps = min(limits["warps"], _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS if of_warp else limits["warps"])
        shared = _rounded_up(self.shared, _SHARED_UNIT) + limits["reserved"]
        shares = {}
        for size in BLOCK_SIZES:
            blocks = min(warps // (size // _WARP), limits["blocks"])
            blocks = min(blocks, limits["shared"] // shared) if shared else blocks
            shares[size] = blocks * (size // _WARP) / limits["warps"]
        return shares

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        shares = self.occupancy()
        figures = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        return {
            **figures,
            "occupancy": {str(size): round(share, 4) for size, share in shares.items()} if shares else None,
        }


def read(report: str) -> Iterator[KernelResources]:
    """Yield the kernels in the output of ptxas, in order, without functions that are not inlined."""
    entry: re.Match[str] | None = None
    owner = ""
    frame: Sequence[str] = ("0", "0", "0")
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entry, frame = match, ("0", "0", "0")
        elif match := _PROPERTIES.search(line):
            owner = match[1]
        elif entry and owner == entry[1] and (match := _FRAME.search(line)):
            frame = match.groups()
        elif entry and (match := _USED.search(line)):
            stack, stores, loads = map(int, frame)
            capability = f"{entry[2]}.{entry[3]}{entry[4]}"
            yield KernelResources(entry[1], capability, int(match[1]), stack, stores, loads, int(match[2] or 0))
            entry = None


@cache
def _limits() -> Mapping[str, Mapping[str, int]]:
    return toml_file.read(Path(__file__).with_name("multiprocessors.toml"))


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
