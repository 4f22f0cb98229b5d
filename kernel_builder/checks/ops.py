"""Check that ops are registered as their schemas, the backend and `torch.compile` need them.

Functions and schemas are compared in the sources, since Torch does not compare them on the stable ABI. The registered
ops are those of the loaded package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernel_builder.checks import op_sources
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.checks.op_sources import Schema


def check_ops(package: CheckedPackage) -> Iterator[Finding]:
    answer = package.load_answers().get(str(package.directory), {}) if package.load_answers else {}
    texts = op_sources.sources(package.project, package.variant) if package.project and package.variant else {}
    schemas = op_sources.read_schemas(texts)
    python = {source.name: source.text for source in package.sources if "define" in source.text}
    findings = list(op_sources.compare(texts, schemas, python))
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
