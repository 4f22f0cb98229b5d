"""The C++ sources of a project without comments, and the op schemas in them.

This is a scan and no parser: conditions are ignored, and schemas that a macro writes are not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

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
_LONGEST = 500  # characters of the arguments of a call


@dataclass(frozen=True)
class Schema:
    """The schema of an op in a source.

    Attributes:
        text: A schema like `relu(Tensor x) -> Tensor`, without namespace.
        source: The file, relative to the project.
        function: The C++ function that a definition names after the schema; empty if none.
    """

    text: str
    source: str
    line: int
    function: str

    @property
    def name(self) -> str:
        """The op's name, with its overload."""
        return self.text.partition("(")[0].strip()


def read_schemas(texts: Mapping[str, str]) -> tuple[Schema, ...]:
    """Return the schemas in sources, which have no comments."""
    return tuple(schema for name, text in texts.items() if "TORCH_LIBRARY" in text for schema in _schemas(name, text))


def sources(project: Project, variant: Variant) -> Mapping[str, str]:
    """Return the sources and headers of a variant, by path, with spaces in place of comments."""
    if not isinstance(project.framework, TorchFramework):
        return {}
    kernels = kernel_sources.of_backend(project, variant.backend, variant.release)
    listed = dict.fromkeys((*project.framework.src, *(path for kernel in kernels for path in kernel.src)))
    suffixes = CXX_SUFFIXES | backends.compiled(variant.backend).suffixes
    wanted = (path for path in listed if path.endswith(tuple(suffixes)) or kernel_sources.is_header(path))
    return {path: _bare(project.root / path) for path in wanted}


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _bare(path: Path) -> str:
    return _COMMENT.sub(_blank, path.read_text(encoding="utf-8", errors="replace"))


def _blank(match: re.Match[str]) -> str:
    """Replace a comment by spaces, so that lines keep their numbers."""
    return match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0])


def named_function(text: str, start: int) -> str:
    """Return the function that the arguments of a registration end with, as in `c10::kCPU, TORCH_FN(f))`."""
    arguments = re.split(r"[;{}]", text[start : start + _LONGEST], maxsplit=1)[0]
    names = re.findall(r"\w+", re.sub(r"<[^<>]*>", "", arguments))
    return names[-1] if names else ""


def _schemas(source: str, text: str) -> Iterator[Schema]:
    for start in _DEF.finditer(text):
        at, schema = start.end(), ""
        while literal := _NEXT_LITERAL.match(text, at):
            # Schemas hold no escapes but of quotes, in the default values of texts.
            schema += literal["raw"] if literal["raw"] is not None else re.sub(r"\\(.)", r"\1", literal["plain"])
            at = literal.end()
        namespace, _, unqualified = schema.partition("(")[0].rpartition("::")
        schema = unqualified + schema[len(schema.partition("(")[0]) :] if namespace else schema
        if "(" in schema and re.match(r"\s*[,)]", text[at:]):
            line = text.count("\n", 0, start.end()) + 1
            yield Schema(schema, source, line, named_function(text, at))
