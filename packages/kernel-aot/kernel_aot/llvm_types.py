"""Types of MLIR's LLVM dialect: their layout, and their names in C++."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Type(NamedTuple):
    """A type of LLVM, with the name of a scalar in C++."""

    size: int
    align: int
    cpp: str
    parts: tuple[Type, ...] = ()
    offsets: tuple[int, ...] = ()
    length: int = 0  # of an array's elements

    def inside(self, path: Sequence[int]) -> tuple[int, Type]:
        """Return the offset of a part of a part, and its type."""
        offset, kind = 0, self
        for index in path:
            offset += index * kind.parts[0].size if kind.length else kind.offsets[index]
            kind = kind.parts[0 if kind.length else index]
        return offset, kind

    @property
    def declared(self) -> str:
        """The type of a variable in C++."""
        return "aot::Pointer" if self.cpp == "char*" else self.cpp

    def scalars(self, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the scalars of a struct with their offsets."""
        if not self.offsets:
            yield from [(start, self.cpp)] if self.size else []
        for offset, part in zip(self.offsets, self.parts, strict=True):
            yield from part.scalars(start + offset)


def parse_type(text: str) -> Type:
    """Return a type of its text in MLIR.

    Raises:
        ValueError: If it is not a number, pointer, struct or array.
    """
    text = text.strip().removeprefix("!llvm.")
    if re.fullmatch(r"ptr(<\d+>)?", text):
        return Type(8, 8, "char*")
    if match := re.fullmatch(r"i(1|8|16|32|64)|f(32|64)", text):
        bits = int(match[1] or match[2])
        size = -(-bits // 8)
        return Type(size, size, {"i1": "bool", "f32": "float", "f64": "double"}.get(text, f"uint{bits}_t"))
    if match := re.fullmatch(r"array<(\d+) x (.*)>", text):
        part, count = parse_type(match[2]), int(match[1])
        return Type(count * part.size, part.align, f"aot::Bytes<{count * part.size}>", (part,), length=count)
    if match := re.fullmatch(r"struct<\((.*)\)>", text):
        parts, offsets, end = tuple(map(parse_type, _split(match[1]))), [], 0
        align = max((part.align for part in parts), default=1)
        for part in parts:
            offsets.append(-(-end // part.align) * part.align)
            end = offsets[-1] + part.size
        size = -(-end // align) * align
        return Type(size, align, f"aot::Bytes<{size}>", parts, tuple(offsets))
    raise ValueError(f"the type {text}")


def _split(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for position, character in enumerate(text + ","):
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0 and text:
            yield text[start:position]
            start = position + 1
