"""Whether the C++ functions of a source fit the schemas that they implement.

On the stable ABI, Torch does not compare them: a `double` that a function takes as `float` becomes another number. On
the full ABI, Torch compares them when a package is loaded, which is not possible on every machine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from kernel_builder.checks.findings import Finding
from kernel_builder.checks.registrations import Schema, named_function

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


def compare(
    name: str, bare: Mapping[str, str], schemas: Sequence[Schema], python: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the implementations that fit no schema.

    Args:
        name: The name of the check.
        bare: The sources and headers of a variant, by path, without comments.
        schemas: The schemas in them.
        python: The Python files of the package that define ops.
    """
    by_op: dict[str, set[str]] = {}
    for schema in schemas:
        by_op.setdefault(schema.name, set()).add(schema.text)
        if schema.function:
            yield from _compare_function(name, schema.source, schema.line, schema.text, schema.function, bare)
    for path, text in bare.items():
        for match in _IMPL.finditer(text):
            line = text.count("\n", 0, match.start("op")) + 1
            op = match["op"]
            defined = any(re.search(_DEFINED.format(op=op), other) for other in bare.values())
            if not defined and not any(re.search(rf"['\":]{op}\b", other) for other in python.values()):
                close = difflib.get_close_matches(op, by_op, n=1)
                yield Finding(
                    name,
                    path,
                    f"line {line}: there is an implementation of {op}, which no schema defines",
                    f"did you mean {close[0]}?" if close else f'define it: ops.def("{op}(Tensor x) -> Tensor")',
                )
            elif len(texts := by_op.get(op + (match["overload"] or ""), set())) == 1:
                function = named_function(text, match.end())
                yield from _compare_function(name, path, line, next(iter(texts)), function, bare)


def _compare_function(
    name: str, path: str, line: int, schema: str, function: str, texts: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the differences of a function from the schema, if there is exactly one definition of that name."""
    op, wanted, returned = signature(schema)
    definitions = list(_definitions(function, texts))
    if len(definitions) != 1:
        return
    taken, result = definitions[0]
    if len(wanted) != len(taken):
        yield Finding(
            name,
            path,
            f"line {line}: {function} takes {len(taken)} of the {len(wanted)} arguments of {op}"
            if len(taken) < len(wanted)
            else f"line {line}: {function} takes {len(taken)} arguments, and the schema of {op} has {len(wanted)}",
            "make them equal: Torch passes the arguments of the schema, also those with default values",
        )
        return
    pairs = [(f"takes argument {number}", *pair) for number, pair in enumerate(zip(wanted, taken, strict=True), 1)]
    for does, of_schema, of_function in [*pairs, ("returns its result", returned, result)]:
        expected = _expected(of_schema)
        if expected and _COMPARED.fullmatch(of_function) and of_function not in expected:
            yield Finding(
                name,
                path,
                f"line {line}: {function} {does} as {of_function}, in the schema of {op} it is {of_schema}",
                f"make it {_shown(expected[0])}, which {of_schema} of a schema is in C++: Torch does not convert it",
            )


def _shown(of_function: str) -> str:
    return f"std::{of_function}" if "<" in of_function else of_function


def _expected(of_schema: str) -> tuple[str, ...]:
    """Return the C++ types for a type of a schema; none if they are not known."""
    base, wrappers = of_schema, tuple[str, ...](("",))
    if of_schema.endswith("?"):
        base, wrappers = of_schema[:-1], ("optional",)
    elif listed := re.fullmatch(r"(.*)\[\d*\]", of_schema):
        base, wrappers = listed[1], _LISTS
    values = _VALUES.get(base, ())
    return tuple(f"{wrapper}<{value}>" if wrapper else value for value in values for wrapper in wrappers)


def signature(schema: str) -> tuple[str, list[str], str]:
    """Return an op's name, the types of its parameters and that of its result, without aliases."""
    op, _, rest = schema.partition("(")
    inner, _, result = re.sub(r"\([\w!|* ]+\)", "", rest).partition("->")
    parts = [part.strip() for part in _split(inner.strip()[:-1])]
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
                types = [_NO_TYPE.sub("", _type(part)) for part in _split(match[1])]
                if not any("*" in spelled for spelled in types):
                    yield [spelled for spelled in types if spelled and spelled != "void"], result


def _type(parameter: str) -> str:
    """Return the type of a parameter without its name."""
    return re.sub(r"(?<=[\w>&*\s])\s*\b\w+\s*$", "", parameter.partition("=")[0].strip())


def _split(text: str) -> list[str]:
    """Split a list of parameters at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if text.strip() else []
