"""The machine code of kernels, and the C++ that contains it."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kernel_aot.ops import Op

# Capabilities that only compilers of CUDA 13 are pinned for. The numbers of AMD's architectures are larger.
_NEWER = range(100, 0x900)


@dataclass(frozen=True)
class Cubin:
    """Machine code of a kernel for one capability, or PTX, and the launch that it needs.

    Attributes:
        capability: 90 for 9.0, and 0x942 for gfx942.
        image: The cubin, or PTX that ends in a zero byte.
        scratch: Bytes of global memory that each block needs.
        ptx: The text that the cubin is made of, with a zero byte at its end.
    """

    capability: int
    is_ptx: bool
    image: bytes
    name: str
    threads: int
    shared: int
    scratch: int
    ptx: bytes = b""


def checked_name(name: str) -> str:
    """Return the name of a kernel, which becomes part of C++.

    Raises:
        ValueError: If it is not an identifier.
    """
    if not re.fullmatch(r"[A-Za-z_][\w$]*", name, re.ASCII):
        raise ValueError(f"{name!r} is not the name of a kernel")
    return name


def images(op: Op, cubins: Sequence[Sequence[Cubin]]) -> str:
    """Return the table of an op's compiled kernels, with the machine code."""
    head = f"// The machine code of {op.kernel}. kernel-builder made this file of aot.toml."
    lines = [head, '#include "aot/images.h"', "", "namespace {", ""]
    names: dict[bytes, str] = {}
    newer = {cubin.image for cubin in chain(*cubins) if cubin.capability in _NEWER}
    for cubin in chain(*cubins):
        if cubin.image not in names:
            names[cubin.image] = f"image_{len(names)}"
            lines += _guarded(_array(names[cubin.image], cubin.image), cubin.image in newer)
    lines.append("")
    for number, row in enumerate(cubins):
        lines.append(f"const aot::Image images_{number}[] = {{")
        for cubin in row:
            is_ptx = str(cubin.is_ptx).lower()
            needs = f"{cubin.threads}, {cubin.shared}, {cubin.scratch}"
            text = f'    {{{cubin.capability}, {is_ptx}, {names[cubin.image]}, "{cubin.name}", {needs}}},'
            lines += _guarded(text, cubin.capability in _NEWER)
        lines.append("};")
    lines += ["", "}  // namespace", "", f"aot::Kernel {op.name}_kernels[] = {{"]
    for number in range(len(cubins)):
        count = f"sizeof(images_{number}) / sizeof(aot::Image)"
        lines.append(f"    {{{str(op.prefer_shared).lower()}, images_{number}, {count}, {{}}, {{}}}},")
    lines.append("};")
    return "\n".join(lines) + "\n"


def _guarded(text: str, newer: bool) -> list[str]:
    return ["#if CUDART_VERSION >= 13000", text, "#endif"] if newer else [text]


def _array(name: str, content: bytes) -> str:
    padded = content + b"\0" * (-len(content) % 8)
    words = [f"0x{word:x}" for (word,) in struct.iter_unpack("<Q", padded)]
    rows = [", ".join(words[start : start + 6]) for start in range(0, len(words), 6)]
    return f"alignas(16) const uint64_t {name}[] = {{\n    " + ",\n    ".join(rows) + "};"
