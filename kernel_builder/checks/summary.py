"""Findings of many packages as lines: each once for all variants, and at most twenty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel_builder.checks.findings import CheckReport, Finding

_MOST = 20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 3


def lines(reports: Mapping[str, CheckReport], severity: str, rest: str) -> list[str]:
    """Return the findings of one severity as text, each with its hint.

    Args:
        reports: By variant.
        rest: The place of the findings for which there are no lines, for example "`--json` lists all".
    """
    variants: dict[Finding, list[str]] = {}
    for name, report in reports.items():
        for finding in dict.fromkeys(report.findings):
            if finding.severity == severity:
                variants.setdefault(finding, []).append(name)
    text = []
    for finding, names in list(variants.items())[:_MOST]:
        text.append(f"{finding.path}: {finding.message}{_served(names, len(reports))} [{finding.check}]")
        text.append(f"    {finding.hint}")
    if len(variants) > _MOST:
        text.append(f"... and {len(variants) - _MOST} more; {rest}")
    return text


def _served(variants: Sequence[str], packages: int) -> str:
    if len(variants) < _MANY_VARIANTS:
        return f", in {' and '.join(variants)}"
    return f", in {'all ' if len(variants) == packages else ''}{len(variants)} variants"
