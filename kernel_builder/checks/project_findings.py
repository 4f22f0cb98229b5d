"""Findings for the author of a project: one for each mistake, with the project's files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kernel_builder.checks.findings import CheckedPackage, Finding

# The message of a failed load, the check that may name the cause, and the message of its error, where `{}` is the text
# of the first expression's group.
_CAUSES = (
    (re.compile("undefined symbol"), "undefined", ""),
    (re.compile(r"\b(?:Syntax|Indentation|Tab)Error\b"), "python-source", ""),
    (re.compile(r"\b(?:ModuleNotFound|Import)Error\b"), "python-imports", ""),
    (re.compile("does not define module export function"), "python-abi", ""),
    (re.compile(r"operator \S+::(\w+) does not exist"), "ops", r"\b{}\b|fixed namespace"),
    (re.compile(r"_OpNamespace' \S+ object has no attribute '(\w+)'"), "ops", r"\bop {},"),
)


def repeated(findings: Sequence[Finding]) -> Mapping[Finding, str]:
    """Return the findings of the check `load` that only repeat an error of another check, and that check."""
    errors = [finding for finding in findings if finding.severity == "error"]
    repetitions = {}
    for finding in (error for error in errors if error.check == "load"):
        for pattern, check, cause in _CAUSES:
            if match := pattern.search(finding.message):
                message = cause.format(*match.groups())
                if any(error.check == check and re.search(message, error.message) for error in errors):
                    repetitions[finding] = check
    return repetitions


def in_project(package: CheckedPackage, finding: Finding) -> Finding:
    """Name the project's file instead of its copy in the package, which may be in a directory that is gone later."""
    if package.project is None:
        return finding
    project = package.project
    own = {name: str(path.relative_to(project.root)) for name, path in project.python_files}
    message = finding.message
    for name, path in own.items():
        message = message.replace(f"{package.directory}/{name}", path)
    # Files of the builder are in the package only.
    message = message.replace(f"{package.directory}/", f"build/{package.directory.name}/")
    return replace(finding, path=own.get(finding.path, finding.path), message=message)
