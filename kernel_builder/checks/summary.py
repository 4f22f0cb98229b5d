"""Findings of many packages as few lines: each once for all variants, and at most twenty lines for a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kernel_builder.checks.findings import CheckReport, Finding

_LINES_PER_CHECK = 20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 3


def lines(reports: Mapping[str, CheckReport], severity: str, rest: str) -> list[str]:
    """Return the findings of one severity, in words.

    Args:
        reports: By variant.
        rest: The place of the findings for which there are no lines, for example "`--json` lists all".
    """
    variants: dict[Finding, list[str]] = {}
    for name, report in reports.items():
        for finding in dict.fromkeys(report.findings):
            if finding.severity == severity:
                variants.setdefault(finding, []).append(name)
    checks: dict[str, dict[str, list[Finding]]] = {}
    for finding in variants:
        checks.setdefault(finding.check, {}).setdefault(finding.hint, []).append(finding)
    return [line for by_hint in checks.values() for line in _of_check(by_hint, variants, len(reports), rest)]


def _of_check(
    by_hint: Mapping[str, Sequence[Finding]], variants: Mapping[Finding, Sequence[str]], packages: int, rest: str
) -> Iterator[str]:
    """Yield the lines of one check. A hint follows the findings that it is for."""
    left, printed = _LINES_PER_CHECK - 1, 0
    for hint, findings in by_hint.items():
        shown = findings[: max(0, left - 1)]
        for finding in shown:
            served = _served(variants[finding], packages)
            yield f"{finding.path}: {finding.message}{served} [{finding.check}]"
        if shown:
            yield f"    {hint}"
            left -= len(shown) + 1
            printed += len(shown)
    total = sum(map(len, by_hint.values()))
    if total > printed:
        yield f"... and {total - printed} more; {rest}"


def _served(variants: Sequence[str], packages: int) -> str:
    if len(variants) < _MANY_VARIANTS:
        return f", in {' and '.join(variants)}"
    return f", in {'all ' if len(variants) == packages else ''}{len(variants)} variants"
