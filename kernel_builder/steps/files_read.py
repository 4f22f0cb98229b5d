"""The files that a compile step has read, by its compiler's and assembler's own lists, and those that it may read.

The include scan finds the files before the compiler runs; these lists show afterwards that it has found all. Names of
files have any encoding, so undecodable bytes become surrogates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from kernel_builder.backends.host_code import HEADERS_PRINTED
from kernel_builder.steps.graph import CompileStep

# Lists of the files that the compiler and the assembler have read, as rules of make. clang lists the headers of host
# code in the first, and the headers for all architectures in HEADERS_PRINTED, one name per line.
HEADERS_READ, ASSEMBLED = "headers-read", "assembled"


def listed(directory: Path) -> list[str]:
    """Return the files that a step has read, without `x/../`. Relative names, from inside, begin with `./`."""
    names: list[str] = []
    for name in (HEADERS_READ, ASSEMBLED, HEADERS_PRINTED):
        if (directory / name).exists():
            content = os.fsdecode((directory / name).read_bytes())
            names += content.split("\n") if name == HEADERS_PRINTED else _in_rules(content)
    return list(dict.fromkeys(map(_plain, filter(None, names))))


def _in_rules(rules: str) -> Iterator[str]:
    """Yield the files on which rules of make say that `out.o` depends."""
    for word in re.findall(r"(?:\\ |[^ \t\n])+", re.sub(r"(?m)^out[.]o ?:(?= |$)|\\$", "", rules)):
        yield word.replace("\\ ", " ").replace("\\#", "#").replace("$$", "$")


def _plain(name: str) -> str:
    name = os.path.normpath(name)
    return "/" + name.lstrip("/") if name.startswith("/") else "./" + name


def foreign(names: Iterable[str], readable: Iterable[str]) -> list[str]:
    """Return the names that match none of the expressions."""
    known = re.compile("|".join(f"(?:{expression})" for expression in readable))
    return [name for name in names if not known.fullmatch(name)]


def readable(step: CompileStep, inside: Path) -> list[str]:
    """Return expressions for the paths of all files that a compiler may read in a step."""
    roots = {str(place) for root in step.roots.values() for place in places(root)}
    return [
        r"\./(src|builder)/.*",
        *(f"{re.escape(root)}/.*" for root in sorted(roots)),
        *step.headers,
        # The assembler's input, and the names in it of the files that it was generated from.
        rf"{re.escape(str(inside / 'tmp'))}/(cc\w+|[^/]+-[0-9a-f]+)\.s",
        r"\./[^/]+\.(c|cc|cpp|cu|cxx|ii)",
        rf"\./[^/]+{re.escape(Path(step.source).suffix)}",
    ]


@lru_cache(maxsize=64)
def places(root: Path) -> frozenset[Path]:
    """Return the real directories of a tree's files, by which g++ names headers: a toolkit may consist of links."""
    found = {root, root.resolve()}
    for directory in (root, root / "include"):
        for entry in os.scandir(directory) if directory.is_dir() else ():
            if entry.is_symlink():
                real = Path(entry.path).resolve()
                found.add(real if real.is_dir() else real.parent)
    return frozenset(found)
