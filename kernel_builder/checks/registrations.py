"""The op registrations that an author wrote: schemas and dispatch keys in C++ sources, with their places.

This is a scan and no parser: conditions are ignored, and what a macro writes is not found.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from kernel_builder import backends
from kernel_builder.backends.host_code import CXX_SUFFIXES
from kernel_builder.config import kernel_sources
from kernel_builder.config.project import Project, TorchFramework
from kernel_builder.config.variant import Variant

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)
_DEF = re.compile(r"\.\s*def\s*\(\s*(?=R?\")")
_NEXT_LITERAL = re.compile(
    r'\s*(?:R"(?P<mark>[^\s()\\]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<plain>(?:\\.|[^"\\\n])*)")', re.S
)
_KEY = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY_IMPL(?:_EXPAND)?\s*\(\s*\w+\s*,\s*(\w+)\s*,")
_LIBRARY = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT)?(?:_EXPAND)?\s*\(\s*(\w+)\s*,")
_OWN_LIBRARY = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_EXPAND)?\s*\(\s*(TORCH_EXTENSION_NAME)\s*,")
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|elif|else|endif)", re.M)
_NAMESPACE = re.compile(
    r"^[ \t]*(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT)?(?:_EXPAND)?\s*\(\s*(\w*[a-z]\w*)\s*,\s*\w+\s*\)\s*\{", re.M
)
# A definition or an implementation whose name has a namespace, in a library of the package's own.
_QUALIFIED = re.compile(r'\.\s*(?:def|impl)\s*\(\s*(?:R"\w*\(|")\s*(\w+)::\w')
_OPENING = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?(?:_EXPAND)?\s*\(\s*(\w+)\s*,")
# What makes a binary a module of Python, by the builder's macro or otherwise.
_INITIALISER = re.compile(r"\bREGISTER_EXTENSION\b|\bPyInit_|\bPYBIND11_MODULE\b|\bPyMODINIT_FUNC\b|\bPyModuleDef\b")
# Registers ops by their full names, when the library is loaded.
_REGISTRY = re.compile(r"\bRegisterOperators\b[^;]*")
_LONGEST = 500  # characters of the arguments of a call
# No keyword of Torch's parser, which has these besides Python's.
_NAME = rf"(?!(?:{'|'.join((*keyword.kwlist, 'Ellipsis', 'NoneType'))})\b)[A-Za-z]\w*"
_TYPE = r"(?:Tensor(?:!|\([a-z]!\)|\[\])?|(?:int|float|bool)(?:\[\])?|str)"
_REQUIRED = rf" *{_TYPE}\?? +{_NAME} *"
_OPTIONAL = (
    rf" *(?:{_TYPE}\? +{_NAME}=None|int +{_NAME}=-?\d{{1,9}}|bool +{_NAME}=(?:True|False)"
    rf"|float +{_NAME}=\d{{1,9}}(?:\.\d{{1,9}})?(?:e-\d)?) *"
)
# Schemas of common types, all of which Torch's parser accepts.
PLAIN_SCHEMA = re.compile(
    rf" *{_NAME}\((?:{_REQUIRED}(?:,{_REQUIRED})*(?:,{_OPTIONAL})*|{_OPTIONAL}(?:,{_OPTIONAL})*|)\)"
    r" *-> *(?:Tensor|int|float|bool|\(Tensor(?:, ?Tensor)*\)|\(\)) *",
    re.ASCII,
)


@dataclass(frozen=True)
class WrittenText:
    """A text of a registration in a source.

    Attributes:
        text: A schema like `relu(Tensor x) -> Tensor`, without namespace; a dispatch key; the namespace of the
            package's library, of another one, or before a name in the package's; or the class of a registry.
        source: The file, relative to the project.
        places: The line and column of each character, and of the end; both count from 1.
        function: The C++ function that a definition names after the schema; empty if none.
        library: The namespace of a schema's library as it is written.
        branch: The branches of conditions (`#if`) that it is in; equal in texts of a source that are compiled together.
    """

    kind: Literal["schema", "key", "library", "namespace", "qualified", "registry"]
    text: str
    source: str
    places: tuple[tuple[int, int], ...]
    function: str = ""
    library: str = ""
    branch: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of a schema's op, with its overload."""
        return self.text.partition("(")[0].strip()


def read(texts: Mapping[str, str]) -> tuple[WrittenText, ...]:
    """Return the texts of registrations in sources, which have no comments."""
    defined = {name for text in texts.values() for name in re.findall(r"#[ \t]*define[ \t]+(\w+)", text)}
    holding = {name: text for name, text in texts.items() if registers(text)}
    scans = (_schemas, _keys, _libraries, _namespaces, _qualified, _registries)
    written = (entry for name, text in holding.items() for scan in scans for entry in scan(name, text))
    return tuple(entry for entry in written if entry.kind == "schema" or entry.text not in defined)


def registers(text: str) -> bool:
    """Return whether a source may register ops."""
    return "TORCH_LIBRARY" in text or "RegisterOperators" in text


def has_initialiser(texts: Mapping[str, str]) -> bool:
    """Return whether a source makes the binary a module of Python."""
    return any(map(_INITIALISER.search, texts.values()))


def sources(project: Project, variant: Variant) -> Mapping[str, str]:
    """Return the sources and headers of a variant, by path, with spaces in place of comments."""
    if not isinstance(project.framework, TorchFramework):
        return {}
    kernels = kernel_sources.of_backend(project, variant.backend, variant.release)
    listed = dict.fromkeys((*project.framework.src, *(path for kernel in kernels for path in kernel.src)))
    suffixes = CXX_SUFFIXES | backends.compiled(variant.backend).suffixes
    wanted = (path for path in listed if path.endswith(tuple(suffixes)) or kernel_sources.is_header(path))
    return {path: _bare(project.root / path) for path in wanted}


def implemented_somewhere(project: Project, op: str) -> bool:
    """Return whether a source of any backend implements an op by its name, or gives the name to a macro."""
    op = re.escape(op)
    if not isinstance(project.framework, TorchFramework):
        return False
    implements = re.compile(rf'\.\s*impl\s*\(\s*"{op}"|\b[A-Z][A-Z0-9_]+\s*\([^;{{}}"]*"?\b{op}\b')
    listed = (*project.framework.src, *(path for kernel in project.kernels for path in kernel.src))
    paths = (project.root / path for path in dict.fromkeys(listed))
    return any(implements.search(_bare(path)) for path in paths if path.is_file())


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _bare(path: Path) -> str:
    return _COMMENT.sub(_blank, path.read_text(encoding="utf-8", errors="replace"))


def _blank(match: re.Match[str]) -> str:
    """Replace a comment by spaces, so that places stay what they are."""
    return match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])


def _places(text: str, offsets: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)) for at in offsets)


def _branch(text: str, end: int) -> tuple[int, ...]:
    """Return the branches that a place is in: for each condition around it, where the branch begins."""
    branches: list[int] = []
    for match in _CONDITION.finditer(text, 0, end):
        if match[1] != "if" and branches:
            branches.pop()
        if match[1] != "endif":
            branches.append(match.start())
    return tuple(branches)


def named_function(text: str, start: int) -> str:
    """Return the function that the arguments of a registration end with, as in `c10::kCPU, TORCH_FN(f))`."""
    arguments = re.split(r"[;{}]", text[start : start + _LONGEST], maxsplit=1)[0]
    names = re.findall(r"\w+", re.sub(r"<[^<>]*>", "", arguments))
    return names[-1] if names else ""


def _schemas(source: str, text: str) -> Iterator[WrittenText]:
    libraries = list(_LIBRARY.finditer(text))
    for start in _DEF.finditer(text):
        at, schema, offsets = start.end(), "", []
        while literal := _NEXT_LITERAL.match(text, at):
            part = "raw" if literal["raw"] is not None else "plain"
            # Schemas hold no escapes but of quotes, in the default values of texts.
            for piece in re.finditer(r"\\?(.)" if part == "plain" else r"(.)", literal[part], re.S):
                schema += piece[1]
                offsets.append(literal.start(part) + piece.start(1))
            at = literal.end()
        namespace = len(schema.partition("(")[0].rpartition("::")[0])
        skipped = namespace + 2 if namespace else 0
        schema, offsets = schema[skipped:], offsets[skipped:]
        if "(" in schema and re.match(r"\s*[,)]", text[at:]):
            places = _places(text, [*offsets, at - 1])
            library = next((opening[1] for opening in reversed(libraries) if opening.start() < at), "")
            branch = _branch(text, at)
            yield WrittenText("schema", schema, source, places, named_function(text, at), library, branch)


def _namespaces(source: str, text: str) -> Iterator[WrittenText]:
    """Yield fixed namespaces. Names without small letters are macros, which a flag may define."""
    for match in _NAMESPACE.finditer(text):
        offsets = list(range(match.start(1), match.end(1) + 1))
        yield WrittenText("namespace", match[1], source, _places(text, offsets))


def _libraries(source: str, text: str) -> Iterator[WrittenText]:
    for match in _OWN_LIBRARY.finditer(text):
        branch = _branch(text, match.start())
        yield WrittenText("library", match[1], source, _places(text, [match.start(1)]), branch=branch)


def _qualified(source: str, text: str) -> Iterator[WrittenText]:
    libraries = list(_OPENING.finditer(text))
    for match in _QUALIFIED.finditer(text):
        library = next((opening[1] for opening in reversed(libraries) if opening.start() < match.start()), "")
        if library == "TORCH_EXTENSION_NAME":
            yield WrittenText("qualified", match[1], source, _places(text, [match.start(1)]))


def _registries(source: str, text: str) -> Iterator[WrittenText]:
    """Yield the first registry of a source whose ops are not in the package's own namespace."""
    for match in _REGISTRY.finditer(text):
        if "TORCH_EXTENSION_NAME" not in match[0]:
            yield WrittenText("registry", "RegisterOperators", source, _places(text, [match.start()]))
            return


def _keys(source: str, text: str) -> Iterator[WrittenText]:
    for match in _KEY.finditer(text):
        offsets = list(range(match.start(1), match.end(1) + 1))
        yield WrittenText("key", match[1], source, _places(text, offsets))
