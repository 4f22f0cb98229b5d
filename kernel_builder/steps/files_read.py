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

_ASKED = re.compile(r"__has_include(?:_next)?\s*\(\s*[<\"]([^>\"\n]+)")
_SYSTEM = (Path("/usr/local/include"), Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu"))


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


def asked(step: CompileStep, inside: Path) -> list[str]:
    """Return the machine's headers for which the project's files ask by `__has_include`: compilers do not list them.

    Names that a macro holds are not among them.
    """
    words = iter(step.argv)
    searched = [Path("src") / Path(name).parent for name, _ in step.files]
    for word in words:
        if word in ("-I", "-isystem") or word.startswith("-I"):
            directory = word[2:] if word.startswith("-I") and word != "-I" else next(words, ".")
            for token, root in step.roots.items():
                directory = directory.replace(token, str(root))
            searched.append(Path(directory))
    names = {
        name for path, _ in step.files for name in _ASKED.findall((inside / "src" / path).read_text(errors="replace"))
    }
    elsewhere = [name for name in names if not any((inside / directory / name).exists() for directory in searched)]
    return [str(directory / name) for name in sorted(elsewhere) for directory in _SYSTEM if (directory / name).exists()]


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
