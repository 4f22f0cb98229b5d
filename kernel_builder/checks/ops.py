"""Check that ops are registered as their schemas, the backend and `torch.compile` need them.

Functions and schemas are compared in the sources: on the stable ABI, Torch does not compare them, and a `double` that a
function takes as `float` becomes another number. On the full ABI, Torch compares them when it loads a package, which is
not possible on every machine. The comparison is a scan and no parser: conditions are ignored, and schemas that a macro
writes are not found. The registered ops are those of the loaded package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_builder import backends
from kernel_builder.backends.host_code import CXX_SUFFIXES
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.python_rules import sources_of
from kernel_builder.config import kernel_sources
from kernel_builder.config.project import Project, TorchFramework
from kernel_builder.config.variant import Variant
from kernel_builder.steps.include_scan import LITERAL


def check_ops(package: CheckedPackage) -> Iterator[Finding]:
    answer = package.load_answers().get(str(package.directory), {}) if package.load_answers else {}
    texts = sources(package.project, package.variant) if package.project and package.variant else {}
    schemas = [schema for name, text in texts.items() if "TORCH_LIBRARY" in text for schema in _schemas(name, text)]
    python = {source.name: source.text for source in sources_of(package) if "define" in source.text}
    findings = list(compare(texts, schemas, python))
    if not findings:  # an op may be missing in the loaded package because of these
        findings = list(_in_loaded(answer, schemas))
    yield from findings
    if not findings and answer.get("outcome") != "loaded":
        raise NotApplicable(f"the package is not loaded: {answer.get('text') or 'it is not for this machine'}")


def _in_loaded(answer: Mapping[str, Any], schemas: Sequence[Schema]) -> Iterator[Finding]:
    """Yield the wrong registrations among the ops of a loaded package."""
    lines = {schema.name: (schema.source, f"line {schema.line}: ") for schema in schemas}
    ops = answer.get("ops") or ()
    has_any = any(op["implemented"] for op in ops)
    for op in ops:
        # A failed load leaves out the implementations after the failure.
        if op["namespace"] or answer["outcome"] == "loaded":
            registered, _, number = str(op["place"]).rpartition(":")
            in_binary = (registered or "the binary", f"line {number}: " if number else "")
            path, line = lines.get(op["name"], in_binary)
            for finding in _registered(op, line, has_any=has_any):
                yield replace(finding, path=path)


def _registered(op: Mapping[str, Any], line: str, *, has_any: bool) -> Iterator[Finding]:
    """Yield the problems of an op; `has_any` if another op of the package has an implementation.

    Public projects define all their ops for every backend and implement some for one backend alone, so a missing
    implementation is a warning then.
    """
    name = op["name"]
    if op["namespace"]:
        yield Finding(
            f"{line}{name} is registered in the fixed namespace {op['namespace']!r}: two versions of the kernel could "
            "not be loaded in one process",
            "write TORCH_EXTENSION_NAME instead: TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops)",
        )
    elif op["key"] and not op["implemented"]:
        others = f"only for {', '.join(op['keys'])}" if op["keys"] else "nor for another backend"
        yield Finding(
            f"{line}{name} has no implementation for {op['key']}, {others}",
            f"register one under {op['key']}, by the same name; or define the op only where it is implemented: "
            f"#if defined({op['key']}_KERNEL)",
            "error" if op["keys"] or not has_any else "warning",
        )
    elif not op["fake"]:
        yield Finding(
            f"{line}{name} has no fake, so torch.compile fails at it",
            f'add one in Python: @torch.library.register_fake(add_op_namespace_prefix("{name}"))',
            "warning",
        )


_DEF = re.compile(r"\.\s*def\s*\(\s*(?=R?\")")
_NEXT_LITERAL = re.compile(
    r'\s*(?:R"(?P<mark>[^\s()\\]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<plain>(?:\\.|[^"\\\n])*)")', re.S
)
_LONGEST = 500  # characters of the arguments of a call
_IMPL = re.compile(r"\.\s*impl\s*\(\s*\"(?P<op>\w+)(?P<overload>\.\w+)?\"\s*,")
# A schema, also one that a macro completes, or a definition from a function.
_DEFINED = r'"(?:\w+::)?{op}(?:\.\w+)?\(|def\s*\(\s*"(?:\w+::)?{op}"'
_INT64 = ("int64_t", "long", "longint", "longlong")
# A type of a schema -> the C++ types of its values, the best one first. Types that are not here are not compared.
_VALUES = {
    "Tensor": ("Tensor",),
    "int": _INT64,
    "SymInt": _INT64,
    "float": ("double",),
    "bool": ("bool",),
    "()": ("void",),
}
_LISTS = ("vector", "ArrayRef", "HeaderOnlyArrayRef", "List")
# The C++ types that are compared. Others may be names for any type.
_PLAIN = "Tensor|float|double|bool|void|char|short|int|long|longint|longlong|int8_t|int16_t|int32_t|int64_t"
_COMPARED = re.compile(rf"(?:(?:optional|{'|'.join(_LISTS)})<)?(?:{_PLAIN})>?")
_NO_TYPE = re.compile(r"\b(?:const|inline|static|extern|else|return|\w+::)\s*|[&\s]")


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
    def blank(match: re.Match[bytes]) -> bytes:  # lines keep their numbers
        return re.sub(rb"[^\n]", b" ", match[0]) if match["comment"] else match[0]

    return LITERAL.sub(blank, path.read_bytes()).decode("utf-8", "replace")


def _named_function(text: str, start: int) -> str:
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
            yield Schema(schema, source, line, _named_function(text, at))


def compare(bare: Mapping[str, str], schemas: Sequence[Schema], python: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the implementations that fit no schema.

    Args:
        bare: The sources and headers of a variant, by path, without comments.
        schemas: The schemas in them.
        python: The Python files of the package that define ops.
    """
    by_op: dict[str, set[str]] = {}
    for schema in schemas:
        by_op.setdefault(schema.name, set()).add(schema.text)
        if schema.function:
            yield from _compare_function(schema, bare)
    for path, text in bare.items():
        for match in _IMPL.finditer(text):
            line = text.count("\n", 0, match.start("op")) + 1
            op = match["op"]
            defined = any(re.search(_DEFINED.format(op=op), other) for other in bare.values())
            if not defined and not any(re.search(rf"['\":]{op}\b", other) for other in python.values()):
                close = difflib.get_close_matches(op, by_op, n=1)
                hint = f"did you mean {close[0]}?" if close else f'define it: ops.def("{op}(Tensor x) -> Tensor")'
                message = f"line {line}: there is an implementation of {op}, which no schema defines"
                yield Finding(message, hint, path=path)
            elif len(texts := by_op.get(op + (match["overload"] or ""), set())) == 1:
                function = _named_function(text, match.end())
                yield from _compare_function(Schema(next(iter(texts)), path, line, function), bare)


def _compare_function(schema: Schema, texts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the differences of a function from the schema, if there is exactly one definition of that name."""
    op, wanted, returned = _signature(schema.text)
    definitions = list(_definitions(schema.function, texts))
    if len(definitions) != 1:
        return
    taken, result = definitions[0]
    where = f"line {schema.line}: {schema.function}"
    if len(wanted) != len(taken):
        counts = f"{len(taken)} arguments, and the schema of {op} has {len(wanted)}"
        if len(taken) < len(wanted):
            counts = f"{len(taken)} of the {len(wanted)} arguments of {op}"
        hint = "make them equal: Torch passes the arguments of the schema, also those with default values"
        yield Finding(f"{where} takes {counts}", hint, path=schema.source)
        return
    pairs = [(f"takes argument {number}", *pair) for number, pair in enumerate(zip(wanted, taken, strict=True), 1)]
    for does, of_schema, of_function in [*pairs, ("returns its result", returned, result)]:
        expected = _expected(of_schema)
        if expected and _COMPARED.fullmatch(of_function) and of_function not in expected:
            best = f"std::{expected[0]}" if "<" in expected[0] else expected[0]
            yield Finding(
                f"{where} {does} as {of_function}, in the schema of {op} it is {of_schema}",
                f"make it {best}, which {of_schema} of a schema is in C++: Torch does not convert it",
                path=schema.source,
            )


def _expected(of_schema: str) -> tuple[str, ...]:
    """Return the C++ types for a type of a schema; none if they are not known."""
    base, wrappers = of_schema, tuple[str, ...](("",))
    if of_schema.endswith("?"):
        base, wrappers = of_schema[:-1], ("optional",)
    elif listed := re.fullmatch(r"(.*)\[\d*\]", of_schema):
        base, wrappers = listed[1], _LISTS
    values = _VALUES.get(base, ())
    return tuple(f"{wrapper}<{value}>" if wrapper else value for value in values for wrapper in wrappers)


def _signature(schema: str) -> tuple[str, list[str], str]:
    """Return an op's name, the types of its parameters and that of its result, without aliases."""
    op, _, rest = schema.partition("(")
    inner, _, result = re.sub(r"\([\w!|* ]+\)", "", rest).partition("->")
    parts = [part.strip() for part in split_list(inner.strip()[:-1])]
    parameters = [part.partition("=")[0].rpartition(" ")[0].strip() for part in parts if part and part != "*"]
    return op.strip(), parameters, result.strip().partition(" ")[0]


def _definitions(function: str, texts: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Yield the types of the parameters and of the result of each function of a name.

    Functions that take pointers are others of that name: device code, and functions that take Torch's stack.
    """
    for text in texts.values():
        for match in re.finditer(rf"\b(?:\w+::)*{function}\s*\(([^;{{}}]*?)\)\s*\{{", text):
            before = re.split(r"[;{}()]|^[ \t]*#.*$", text[max(0, match.start() - 200) : match.start()], flags=re.M)
            if result := _NO_TYPE.sub("", before[-1]):
                types = [_NO_TYPE.sub("", _type(part)) for part in split_list(match[1])]
                if not any("*" in spelled for spelled in types):
                    yield [spelled for spelled in types if spelled and spelled != "void"], result


def _type(parameter: str) -> str:
    """Return the type of a parameter without its name."""
    return re.sub(r"(?<=[\w>&*\s])\s*\b\w+\s*$", "", parameter.partition("=")[0].strip())


def split_list(text: str) -> list[str]:
    """Split a list of parameters at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if text.strip() else []
