"""Check that ops are registered as their schemas, the backend and `torch.compile` need them.

Functions and schemas are compared in the sources, since Torch does not compare them on the stable ABI. The registered
ops are those of the loaded package.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kernel_builder.checks import fakes, implementations, registrations
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.registrations import Schema

NAME = "ops"
_BINARY = "the binary"


def check_ops(package: CheckedPackage) -> Iterator[Finding]:
    answer = package.load_answers().get(str(package.directory), {}) if package.load_answers else {}
    texts = registrations.sources(package.project, package.variant) if package.project and package.variant else {}
    schemas = registrations.read_schemas(texts)
    python = {source.name: source.text for source in package.sources if "define" in source.text}
    findings = list(_in_sources(texts, schemas, python))
    if not findings:  # an op may be missing in the loaded package because of these
        ops = answer.get("ops") or ()
        findings = [*_in_loaded(package, answer, schemas), *fakes.compare(NAME, package.sources, ops)]
    yield from findings
    if not findings and answer.get("outcome") != "loaded":
        raise NotApplicable(f"the package is not loaded: {answer.get('text') or 'it is not for this machine'}")


def _in_sources(texts: Mapping[str, str], schemas: Sequence[Schema], python: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the functions that do not fit a schema, and the schemas of an op that has one already."""
    yield from implementations.compare(NAME, texts, schemas, python)
    firsts: dict[tuple[str, ...], Schema] = {}
    for schema in schemas:
        where = (schema.source, *map(str, schema.branch)) if schema.branch else ()
        first = firsts.setdefault((schema.library, schema.name, *where), schema)
        if first is not schema:
            yield Finding(
                NAME,
                schema.source,
                f"line {schema.line}: {schema.name} is defined again, after line {first.line}"
                + (f" of {first.source}" if first.source != schema.source else ""),
                f"remove one, or make it an overload, such as {schema.name.partition('.')[0]}.other(...): Torch "
                "refuses it, or keeps the first without a message",
            )


def _in_loaded(package: CheckedPackage, answer: Mapping[str, Any], schemas: Sequence[Schema]) -> Iterator[Finding]:
    """Yield the wrong registrations among the ops of a loaded package."""
    lines = {schema.name: (schema.source, f"line {schema.line}: ") for schema in schemas}
    if answer.get("ops") is None:
        return
    ops = answer["ops"]
    yield from _unregistered(schemas, {op["name"] for op in ops}, answer)
    if registered := {op["name"].partition(".")[0] for op in ops if not op["namespace"]}:
        yield from _misnamed(package, registered, answer["text"])
    has_any = any(op["implemented"] for op in ops)
    for op in ops:
        # A failed load leaves out the implementations after the failure.
        if op["namespace"] or answer["outcome"] == "loaded":
            path, line = lines.get(op["name"], (_path(op), _line(op)))
            yield from _registered(op, path, line, has_any=has_any)


def _unregistered(
    schemas: Sequence[Schema], registered: AbstractSet[str], answer: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield the schemas that Torch has refused: on the stable ABI, the load goes on without the op."""
    for schema in schemas:
        op = schema.name.partition(".")[0]
        is_missing = answer["outcome"] == "loaded" or f"::{op} does not exist" in answer["text"]
        if is_missing and schema.library == "TORCH_EXTENSION_NAME" and not (schema.branch or schema.name in registered):
            yield Finding(
                NAME,
                schema.source,
                f"line {schema.line}: Torch has not registered {schema.name}: it refuses the schema or its namespace",
                "a schema is like `name(Tensor x, int[] sizes, float eps=1e-6, Tensor? bias=None) -> Tensor`, without "
                "a namespace",
            )


def _misnamed(package: CheckedPackage, registered: AbstractSet[str], message: str) -> Iterator[Finding]:
    """Yield the names in the package's Python that are not a registered op.

    They are errors if the load fails for them. Otherwise the code may be for another backend.
    """
    for source in package.sources:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and source.dotted(node.value) == "torch.ops.<id>":
                name, use = node.attr, "calls"
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_op_namespace_prefix":
                name, use = getattr(node.args[0], "value", "") if node.args else "", "names"
            else:
                continue
            if isinstance(name, str) and name and name not in registered:
                close = difflib.get_close_matches(name, registered, n=1)
                yield Finding(
                    NAME,
                    source.name,
                    f"line {node.lineno}: {use} the op {name}, which the package does not register",
                    f"did you mean {close[0]}?" if close else f"the ops are {', '.join(sorted(registered))}",
                    "error" if re.search(rf"::{name} does not exist|_OpNamespace' .*'{name}'$", message) else "warning",
                )


def _registered(op: Mapping[str, Any], path: str, line: str, *, has_any: bool) -> Iterator[Finding]:
    """Yield the problems of an op; `has_any` if another op of the package has an implementation.

    Public projects define all their ops for every backend and implement some for one backend alone, so a missing
    implementation is a warning then.
    """
    name = op["name"]
    if op["namespace"]:
        yield _fixed(path, line, name, op["namespace"])
        return
    if op["key"] and not op["implemented"]:
        others = f"only for {', '.join(op['keys'])}" if op["keys"] else "nor for another backend"
        yield Finding(
            NAME,
            path,
            f"{line}{name} has no implementation for {op['key']}, {others}",
            f"register one under {op['key']}, by the same name; or define the op only where it is implemented: "
            f"#if defined({op['key']}_KERNEL)",
            "error" if op["keys"] or not has_any else "warning",
        )
    elif not op["fake"]:
        yield Finding(
            NAME,
            path,
            f"{line}{name} has no fake, so torch.compile fails at it",
            f'add one in Python: @torch.library.register_fake(add_op_namespace_prefix("{name}"))',
            "warning",
        )


def _fixed(path: str, line: str, op: str, namespace: str) -> Finding:
    return Finding(
        NAME,
        path,
        f"{line}{op} is registered in the fixed namespace {namespace!r}: two versions of the kernel could not be "
        "loaded in one process",
        "write TORCH_EXTENSION_NAME instead: TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops)",
    )


def _path(op: Mapping[str, Any]) -> str:
    return str(op["place"]).rpartition(":")[0] or _BINARY


def _line(op: Mapping[str, Any]) -> str:
    return f"line {number}: " if (number := str(op["place"]).rpartition(":")[2]) else ""
