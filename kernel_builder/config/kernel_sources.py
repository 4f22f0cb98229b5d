"""Which kernels of a project go into a binary, with each source in one of them.

The public builder compiles a source that several `[kernel.<name>]` tables of a backend name once, with the capabilities
and flags of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from kernel_builder.config.compiler_flags import options
from kernel_builder.config.project import HEADER_SUFFIXES, Backend, Kernel, Project
from kernel_format.release import Release

# The fields of a kernel with flags, and those with its architectures, where None means all.
FLAGS = ("cxx_flags", "cuda_flags", "hip_flags", "sycl_flags")
_ARCHS = ("cuda_capabilities", "rocm_archs")


def is_header(path: str) -> bool:
    """Return whether a path of `src` is a header, which is not compiled."""
    return PurePosixPath(path).suffix in HEADER_SUFFIXES


def of_backend(project: Project, backend: Backend, release: Release | None) -> tuple[Kernel, ...]:
    """Return the kernels of a backend that are for a release of it."""
    return tuple(kernel for kernel in project.kernels if kernel.backend is backend and backend.serves(kernel, release))


def disjoint(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return the kernels with each source in one of them.

    Sources that several kernels name get a kernel of their own, with the settings of all of these kernels.
    """
    shared = _shared(kernel.src for kernel in kernels)
    moved = {path for paths in shared.values() for path in paths}
    rest = (
        replace(kernel, src=tuple(path for path in _distinct(kernel.src) if path not in moved)) for kernel in kernels
    )
    together = (_merged([kernels[number] for number in numbers], paths) for numbers, paths in shared.items())
    return (*rest, *together)


def _shared(lists: Iterable[Sequence[str]]) -> dict[tuple[int, ...], list[str]]:
    """Return the sources that several lists have, by the numbers of those lists."""
    holders: dict[str, tuple[int, ...]] = {}
    for number, paths in enumerate(lists):
        for path in _distinct(path for path in paths if not is_header(path)):
            holders[path] = (*holders.get(path, ()), number)
    shared: dict[tuple[int, ...], list[str]] = {}
    for path, numbers in holders.items():
        if len(numbers) > 1:
            shared.setdefault(numbers, []).append(path)
    return shared


def _merged(kernels: Sequence[Kernel], src: Sequence[str]) -> Kernel:
    headers = (path for kernel in kernels for path in kernel.src if is_header(path))
    limited = [kernel for kernel in kernels if kernel.name != "torch"] or kernels
    of_all: dict[str, Any] = {}
    for key in FLAGS:  # each option once: nvcc refuses some that are repeated
        every_option = dict.fromkeys(option for kernel in kernels for option in options(getattr(kernel, key)))
        of_all[key] = tuple(word for option in every_option for word in option)
    for key in _ARCHS:
        every = [getattr(kernel, key) for kernel in limited]
        of_all[key] = None if None in every else _distinct(arch for archs in every for arch in archs)
    return replace(
        limited[0],
        depends=_distinct(depend for kernel in kernels for depend in kernel.depends),
        src=(*src, *_distinct(headers)),
        include=_distinct(entry for kernel in kernels for entry in kernel.include),
        **of_all,
    )


def _distinct(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
