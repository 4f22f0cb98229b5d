"""The CUDA runtimes that a binary may meet, and which functions they export: `cuda_runtimes.toml`.

A binary leaves the functions of the runtime undefined, without a version, and takes those of the libcudart that Torch
has loaded. One that only uses what the runtimes of CUDA 12 and 13 both export works with every Torch of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.config.variant import Release

_OF_RUNTIME = re.compile(r"(?:__)?cuda[A-Z]")


@cache
def exports() -> Mapping[Release, frozenset[str]]:
    """Return CUDA release -> the functions of its runtime."""
    data = toml_file.read(Path(__file__).with_name("cuda_runtimes.toml"))
    every = frozenset(data["every"])
    return {Release.parse(release): every | frozenset(own) for release, own in data["release"].items()}


def loading(cuda: Release) -> tuple[Release, ...]:
    """Return the known runtimes that clients load a variant of a CUDA release with: its major, and no older minor."""
    return tuple(release for release in exports() if release.major == cuda.major and release >= cuda)


def lacking(name: str, releases: Iterable[Release]) -> tuple[Release, ...]:
    """Return those of the releases whose runtime does not have a function; none for a name of another library."""
    if not _OF_RUNTIME.match(name):
        return ()
    return tuple(release for release in releases if name not in exports()[release])
