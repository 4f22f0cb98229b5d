"""The include scan: the project's files that a source can reach, and the outside headers that it includes.

The key of a compile step covers the content of these files, and the step's directory holds only these. The scan may
find too many files, since it ignores conditions. A file that it misses is not in the directory, so the compiler reports
it instead of building from a file that no key covers.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernel_builder.config.project_files import check_link
from kernel_format.errors import ConfigError

# The top directories of Torch's headers, in wheels of all releases.
_TORCH_ROOTS = frozenset({"ATen", "c10", "caffe2", "torch"})
# Headers that include Python.h and compile with the limited API. pybind11's do not: with Python's headers, g++ prints
# 1,800 errors of pybind11 in a minute; without, it stops at `#include <Python.h>`.
_PYTHON_HEADERS = re.compile(r"Python\.h|torch/csrc/python_headers\.h")
# Comments, raw strings, characters and strings, in one expression, since each may contain the delimiters of others.
# Every alternative matches at least to the end of the line or file: a failed search for the end at every beginning
# takes quadratic time. The lookahead for first characters makes the search four times as fast.
LITERAL = re.compile(
    rb"(?=[/\"'RuUL])(?:"
    rb"(?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?(?:\*/|\Z))"
    rb"|(?<!\w)(?:u8|[uUL])?(?P<raw>R\"([^()\\\s\"]{0,16})\(.*?(?:\)\3\"|\Z))"
    rb"|(?<!\w)(?:u8|[uUL])?(?P<character>'(?:\\[^\n]|[^'\\\n]){1,16}')"
    rb"|(?<!\w)(?:u8|[uUL])?'[^\n]*"  # in a block that a condition skips, as an unmatched quote
    rb"|\"(?:\\[^\n]|[^\"\\\n])*\"?)",
    re.DOTALL,
)
_CONTINUED = re.compile(rb"\\[ \t\f\v]*\r?\n")
_SPACE = rb"[ \t\f\v\0]*"
_INCLUDE = re.compile(
    rb"^" + _SPACE + rb"(?:#|%:|\?\?=)" + _SPACE + rb"(include|include_next|import|embed)(?!\w)" + _SPACE + rb"(?:"
    rb"<([^>\n]+)>|\"([^\"\n]+)\"|([^\s<\"]))",
    re.M,
)
# Conditions and macros, and the headers in them: a project's macro may pass its parameter on to __has_include.
_CONDITION = re.compile(rb"^" + _SPACE + rb"(?:#|%:|\?\?=)" + _SPACE + rb"(if|elif|define)(?!\w)([^\n]*)", re.M)
_HAS = rb"__has_(?:include|include_next|embed)(?!\w)"
_PASSES_ON = re.compile(rb"\s*(\w+)\(\s*(\w+)\s*\)\s*\(?\s*" + _HAS + rb"\s*\(\s*\2\s*\)\s*\)?\s*")
_NAMED = re.compile(rb"\s*(\w+)\s+(?:<[^>\n]+>|\"[^\"\n]+\")\s*")
_MACRO = re.compile(rb"\s*(\w+)(?:\([^)]*\))?")
_CALL = re.compile(rb"(?:\bdefined\s*\(?\s*\w+)|(\w+)\s*\(\s*([^\s<\"][^)]*)")
_ASKED = re.compile(rb"[\s(](?:<([^<>()\s]+)>|\"([^\"\n]+)\")")
_NAMESPACE = re.compile(rb"(TORCH|TVM_FFI)_EXTENSION_NAME")
# Directives of the assembler that read a file.
_ASSEMBLED = re.compile(rb"\.\s*incbin\b|[\s\";]\.include\s*\\?\"|\\[nt]\.include\s*\\?\"")
# Compilers read these in place of the header or the module beside them.
_PRECOMPILED = re.compile(r"\.[gp]c[hm](/|$)")


@dataclass(frozen=True)
class Scan:
    """The result of the scan of one source."""

    # (project-relative path, SHA-256) of the source and of the project's files that it includes, sorted.
    files: tuple[tuple[str, str], ...]
    torch: bool  # it includes a Torch header
    python: bool  # it includes `Python.h`, directly or through a Torch header
    namespace: bool  # some of the files mention `TORCH_EXTENSION_NAME` or `TVM_FFI_EXTENSION_NAME`
    toolkit_libraries: bool  # it may include a header of `library_headers`
    asked: tuple[str, ...]  # headers for which it may ask by `__has_include`, without those of the project


@dataclass(frozen=True)
class _File:
    """The facts that a scan needs about one file."""

    digest: str
    included: tuple[tuple[str, bool], ...]  # (a header's name, whether in quotes)
    embedded: tuple[str, ...]  # "" for a name in a macro
    asked: frozenset[tuple[str, bool]]  # (a header's name, whether in angle brackets) in conditions and macros
    passes_on: frozenset[bytes]  # macros that pass their parameter on to __has_include
    named: frozenset[bytes]  # macros that are a header's name
    defined: frozenset[bytes]  # other macros
    calls: frozenset[tuple[bytes, bytes]]  # (a macro, its argument that is not a header's name) in conditions
    asks: bool
    asks_next: bool
    computed: bool
    namespace: bool
    assembled: bool


@lru_cache(maxsize=4096)
def _read(path: Path, _size: int, _mtime: int) -> _File:
    content = path.read_bytes()
    assembled = False

    def without(match: re.Match[bytes]) -> bytes:
        nonlocal assembled
        if match["comment"]:
            return b" "
        assembled = assembled or _ASSEMBLED.search(match[0]) is not None
        return b'""' if match["raw"] or match["character"] else match[0]

    bare = LITERAL.sub(without, _CONTINUED.sub(b"", content.removeprefix(codecs.BOM_UTF8)))
    found = [((m[2] or m[3] or b"").decode("utf-8", "replace").strip(), m) for m in _INCLUDE.finditer(bare)]
    asked: set[tuple[str, bool]] = set()
    passes_on, named, defined, calls = set[bytes](), set[bytes](), set[bytes](), set[tuple[bytes, bytes]]()
    for keyword, line in _CONDITION.findall(bare):
        asked.update(((a or b).decode("utf-8", "replace"), bool(a)) for a, b in _ASKED.findall(line))
        if keyword == b"define" and (macro := _PASSES_ON.fullmatch(line) or _NAMED.fullmatch(line)):
            (passes_on if macro.re is _PASSES_ON else named).add(macro[1])
            continue
        macro = _MACRO.match(line) if keyword == b"define" else None
        if macro:
            defined.add(macro[1])
        of_line = _CALL.findall(line, macro.end() if macro else 0)
        calls.update((call, argument.strip()) for call, argument in of_line)
    return _File(
        digest=hashlib.sha256(content).hexdigest(),
        included=tuple((name, match[2] is None) for name, match in found if name),
        embedded=tuple(name for name, match in found if match[1] == b"embed"),
        asked=frozenset(asked),
        passes_on=frozenset(passes_on),
        named=frozenset(named),
        defined=frozenset(defined),
        calls=frozenset(calls),
        asks=b"__has_" in bare,
        asks_next=b"_next" in bare,
        computed=not all(name for name, _ in found),
        namespace=_NAMESPACE.search(bare) is not None,
        assembled=assembled or (b"incbin" in bare and _ASSEMBLED.search(bare) is not None),
    )


def _inside(root: Path, candidate: str) -> str | None:
    """Resolve `..`, and return the project-relative name of a file; None if the project has no such file."""
    parts: list[str] = []
    for part in candidate.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    name = "/".join(parts)
    return name if name and os.path.isfile(root / name) else None  # noqa: PTH113  # `Path` raises for long names


def _of_project(root: Path, places: Iterable[str], target: str) -> str | None:
    """Return the project-relative name of a file that a compiler finds in one of these directories of the project."""
    return next((hit for place in places if (hit := _inside(root, f"{place}/{target}"))), None)


def scan(
    root: Path,
    source: str,
    include: Sequence[str] = (),
    listed: Iterable[str] = (),
    generated: Mapping[str, str] = {},
    library_headers: re.Pattern[str] | None = None,
) -> Scan:
    """Find the files that a source can reach.

    Args:
        source: The source, relative to `root`.
        include: The include directories given for it, relative to `root`.
        listed: The other files of its `src` in `build.toml`. All of them count if a file includes a macro instead of a
            name, since only a preprocessor could tell which file is meant.
        generated: Headers that the builder provides: name -> content.
        library_headers: Headers that need libraries of the back end's toolkit.

    Raises:
        ConfigError: If a file includes another by an absolute path, by the assembler, or through a symbolic link
            out of the project and its git repository; if it embeds one of elsewhere, or is a precompiled header.
    """
    reached: dict[str, _File] = {}
    torch = python = libraries = False
    asked: set[tuple[str, bool]] = set()
    queue = [source]
    real = Path(os.path.realpath(root))
    while queue:
        name = queue.pop()
        if name in reached:
            continue
        status = (root / name).stat()
        facts = reached[name] = _read(root / name, status.st_size, status.st_mtime_ns)
        where, places = str(root / name), [name.rpartition("/")[0], *include]
        if _PRECOMPILED.search(name):
            raise ConfigError("is a precompiled header, which the builder cannot read", where=where, hint="delete it")
        if facts.assembled or not all(_of_project(root, places, target) for target in facts.embedded):
            raise ConfigError(
                "reads a file with the assembler's .incbin or .include, or with #embed a file outside of the project",
                where=where,
                hint="write the content as an array in a header, and include the header",
            )
        if facts.computed:
            torch = libraries = True
            queue += listed
        for target, beside in facts.included:
            if target.startswith("/"):
                raise ConfigError(
                    f"includes {target} by an absolute path",
                    where=where,
                    hint="copy it into the project and include it by its relative name: other machines do not have it",
                )
            ours = _of_project(root, places if beside else include, target)
            if ours is not None:
                # The files that `build.toml` lists were checked when it was read.
                check_link(real, root / ours, ours, str(root / ours))
                queue.append(ours)
            elif target not in generated:
                torch = torch or target.split("/", 1)[0] in _TORCH_ROOTS
                python = python or _PYTHON_HEADERS.fullmatch(target) is not None
                if library_headers and library_headers.fullmatch(target):
                    libraries = True
        asked.update(pair for pair in facts.asked if facts.asks_next or not _of_project(root, places, pair[0]))
    files = reached.values()
    passes_on = {b"__has_include", b"__has_include_next", b"__has_embed"}.union(*(facts.passes_on for facts in files))
    named = set[bytes]().union(*(facts.named for facts in files)).difference(*(facts.defined for facts in files))
    calls = (call for facts in files for call in facts.calls)
    if wrong := sorted(name.decode() for call, name in calls if call in passes_on and name not in named):
        raise ConfigError(
            f"tests with __has_include for {wrong[0]}, which no macro of the project defines as a header's name",
            where=str(root / source),
            hint="write the header as <name.h> in __has_include: other machines may not have it",
        )
    # Pasted tokens or a macro of `cxx-flags` may ask: nothing else has angle brackets there, but names to include.
    asks = any(facts.asks for facts in files)
    found = tuple(sorted({name for name, is_angled in asked if asks or is_angled}))
    digests = sorted((name, facts.digest) for name, facts in reached.items())
    return Scan(tuple(digests), torch, python, any(facts.namespace for facts in files), libraries, found)
