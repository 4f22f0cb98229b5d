"""Check that the package's Python runs on the oldest supported interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import vermin

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.python_files import Source
from kernel_builder.config.variant import Release

NAME = "python-source"

_BUILTIN_TYPE = re.compile(r"'(?:bool|bytes|complex|dict|float|int|list|set|str|tuple|type)\.")


def check_python_source(package: CheckedPackage) -> Iterator[Finding]:
    python = package.policy.python
    for source in package.sources:
        if source.tree is None:
            hint = f"correct the syntax; Python {python} must be able to read it"
            yield Finding(NAME, source.name, source.problem, hint)
        else:
            yield from _versions(source, python)


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _versions(source: Source, python: Release) -> tuple[Finding, ...]:
    """Return the uses of the language and the standard library that are newer than `python`, by vermin's data."""
    config = vermin.Config()
    config.set_format(vermin.formats.ParsableFormat())
    visitor = vermin.visit(source.text, config)
    if not isinstance(visitor, vermin.SourceVisitor):
        return ()  # vermin could not parse the file, and this interpreter could
    findings = []
    for text in visitor.output_text().splitlines():
        # <file>:<line>:<column>:<Python 2>:<Python 3>:<what>
        match = re.fullmatch(r"<unknown>:(\d+):\d*:[^:]*:(\d+\.\d+):(.*)", text)
        if match and int(match[1]) not in source.guarded_lines and Release.parse(match[2]) > python:
            # vermin guesses the type whose method is called; another class may have a method of that name.
            guess = _BUILTIN_TYPE.match(match[3])
            hint = f"write it for Python {python}, or mark a line that never runs there with `# novm`"
            message = f"line {match[1]}: {match[3]} needs Python {match[2]}"
            findings.append(Finding(NAME, source.name, message, hint, "warning" if guess else "error"))
    return tuple(findings)
