"""Whether the C++ functions of a source fit the schemas that they implement.

On the stable ABI, Torch does not compare them: a `double` that a function takes as `int64_t` becomes another number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from kernel_builder.checks.findings import Finding
from kernel_builder.checks.registrations import WrittenText

_IMPL = re.compile(r"\.\s*impl\s*\(\s*\"(?P<op>\w+)(?:\.\w+)?\"\s*,\s*(?:TORCH_BOX\s*\(\s*&?\s*(?P<function>\w+))?")
# A schema, also one that a macro completes, or a definition from a function.
_DEFINED = r'"(?:\w+::)?{op}(?:\.\w+)?\(|def\s*\(\s*"(?:\w+::)?{op}"'
# A type of a schema -> the types by which the stable ABI passes it. Types that are not here are not compared.
_TYPES = {
    "Tensor": {"Tensor"},
    "Tensor?": {"optional<Tensor>"},
    "int": {"int64_t"},
    "SymInt": {"int64_t"},
    "float": {"double"},
    "bool": {"bool"},
}


def compare(
    name: str, bare: Mapping[str, str], written: Sequence[WrittenText], python: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the implementations that fit no schema.

    Args:
        name: The name of the check.
        bare: The sources and headers of a variant, by path, without comments.
        written: The schemas in them.
        python: The Python files of the package that define ops.
    """
    schemas: dict[str, list[str]] = {}
    for one in written:
        if one.kind == "schema":
            schemas.setdefault(one.name, []).append(one.text)
    for path, text in bare.items():
        for match in _IMPL.finditer(text):
            where = f"line {text.count(chr(10), 0, match.start('op')) + 1}: "
            op, function = match["op"], match["function"]
            defined = any(re.search(_DEFINED.format(op=op), other) for other in bare.values())
            if not defined and not any(re.search(rf"['\":]{op}\b", other) for other in python.values()):
                close = difflib.get_close_matches(op, schemas, n=1)
                yield Finding(
                    name,
                    path,
                    f"{where}there is an implementation of {op}, which no schema defines",
                    f"did you mean {close[0]}?" if close else f'define it: ops.def("{op}(Tensor x) -> Tensor")',
                )
            elif function and len(schemas.get(op, ())) == 1:
                yield from _compared(name, path, where, _parameters(schemas[op][0]), _definition(function, bare))


def _compared(
    name: str, path: str, where: str, schema: tuple[str, list[str]], function: tuple[str, list[str]] | None
) -> Iterator[Finding]:
    op, wanted = schema
    if function is None:
        return
    called, taken = function
    if len(wanted) != len(taken):
        yield Finding(
            name,
            path,
            f"{where}{called} takes {len(taken)} of the {len(wanted)} arguments of {op}"
            if len(taken) < len(wanted)
            else f"{where}{called} takes {len(taken)} arguments, and the schema of {op} has {len(wanted)}",
            "make them equal: Torch passes the arguments of the schema, also those with default values",
        )
        return
    for number, (of_schema, of_function) in enumerate(zip(wanted, taken, strict=True), 1):
        expected = _TYPES.get(of_schema)
        if expected and of_function in set().union(*_TYPES.values()) - expected:
            yield Finding(
                name,
                path,
                f"{where}{called} takes argument {number} as {of_function}, in the schema of {op} it is {of_schema}",
                f"take it as {' or '.join(sorted(expected))}: Torch does not convert it on the stable ABI",
            )


def _parameters(schema: str) -> tuple[str, list[str]]:
    """Return an op's name and the types of its parameters, without aliases."""
    op, _, rest = schema.partition("(")
    inner = re.sub(r"\([\w!|* ]*\)", "", rest.partition("->")[0].strip()[:-1])
    parts = [part.strip() for part in _split(inner)]
    return op.strip(), [part.rpartition(" ")[0].strip() for part in parts if part and part != "*"]


def _definition(function: str, texts: Mapping[str, str]) -> tuple[str, list[str]] | None:
    """Return a function and the types of its parameters, if exactly one definition of that name is found."""
    found = []
    for text in texts.values():
        for match in re.finditer(rf"\b{function}\s*\(([^;{{}}]*?)\)\s*\{{", text):
            types = [re.sub(r"\b(?:const|std::|torch::stable::)|[&\s]", "", _type(part)) for part in _split(match[1])]
            found.append([one.replace("std::", "").replace("torch::stable::", "") for one in types if one])
    return (function, found[0]) if len(found) == 1 else None


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
