"""`kernel-builder audit`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from kernel_builder.checks import CHECKS
from kernel_builder.cli.shared_options import json_option, origins, table
from kernel_builder.hub.audit import Audit, AuditedVariant
from kernel_builder.hub.audit import audit as describe
from kernel_builder.plural import counted
from kernel_format.errors import CheckError

_LINES = 20  # of kernels and of findings
_UNSELECTED = "no-variant"


@click.command()
@click.argument("name", metavar="REPO[@REVISION]|DIR")
@click.option("--variant", metavar="NAME", help="Print the details of this variant. [default: the one that loads here]")
@click.option("--since", metavar="REVISION|DIR", help="Compare the API with an earlier revision of REPO, such as v1.")
@click.option("--load", is_flag=True, help="Download everything, and load the packages in a sandbox.")
@click.option("--signer", "signers", multiple=True, metavar="URI|FILE", help="A trusted signer, as for `verify`.")
@click.option(
    "--allow",
    multiple=True,
    metavar="CHECK",
    type=click.Choice([*CHECKS, _UNSELECTED]),
    help=f"Ignore findings of this check in the exit code; `{_UNSELECTED}` ignores that no variant loads here.",
)
@json_option
def audit(name: str, variant: str | None, allow: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Describe a published kernel without running it.

    Lists the variants with their requirements, the device code by architecture, the kernels, the needed libraries, the
    ops, the origin, and the findings of all checks that do not need a whole binary. Of a binary, downloads only headers
    and tables.

    The exit code is 1 if a check finds an error or a call that ends the process, or if no variant loads here.
    Otherwise, it is 0.

    \b
    kernel-builder audit kernels-community/rmsnorm
    kernel-builder audit kernels-community/rmsnorm@v2 --since v1
    kernel-builder audit my-kernel --json
    """
    result = describe(name, **options)
    if variant and variant not in {audited.variant for audited in result.variants}:
        raise CheckError(
            "there is no such variant", where=f"--variant {variant}",
            hint=f"expected one of {', '.join(audited.variant for audited in result.variants)}",
        )  # fmt: skip
    errors = {
        f.check for each in result.variants for f in each.findings if f.severity == "error" or f.check == "process-end"
    }
    ok = errors <= set(allow) and bool(result.loads or _UNSELECTED in allow)
    if as_json:
        click.echo(json.dumps({"ok": ok, **asdict(result)}, indent=2))
    else:
        _print(result, variant or result.loads)
    sys.exit(0 if ok else 1)


def _print(result: Audit, selected: str | None) -> None:
    downloaded = f", {result.downloaded / 1e6:.2f} MB downloaded" if result.downloaded else ""
    click.echo(f"{result.name}: {counted(len(result.variants), 'variant')}{downloaded}")
    click.echo(f"here: {result.environment}")
    nearest = min(result.variants, key=lambda audited: len(audited.changes))
    missing = f"no; nearest: {nearest.variant}, which needs {' and '.join(nearest.changes)}"
    click.echo(f"loads here: {f'yes, {result.loads}' if result.loads else missing}")
    if result.client:
        click.echo(f"transformers uses kernels with {result.client} only: pip install '{result.client}'")
    click.echo("")
    titles = list(dict.fromkeys(title for audited in result.variants for title in audited.requires))
    rows = [["variant", *titles, "size", "to load it here"]]
    for audited in result.variants:
        needed = [audited.requires.get(title, "-").replace(" and later", "+") for title in titles]
        rows.append([audited.variant, *needed, f"{audited.size / 1e6:.2f} MB", "; ".join(audited.changes) or "-"])
    table(rows)
    details = next((audited for audited in result.variants if audited.variant == selected), result.variants[0])
    _details(details)
    if result.api_changes is not None:
        _section("API changes", result.api_changes or ["none"])
    findings = {(f.check, f.path, f.message, f.hint): f.severity for each in result.variants for f in each.findings}
    lines = [
        f"{severity} [{check}] {path}: {message}\n    {hint}"
        for (check, path, message, hint), severity in findings.items()
    ]
    _section("findings", lines or ["none"])


def _details(audited: AuditedVariant) -> None:
    click.echo(f"\n{audited.variant}")
    if audited.device_code:
        rows = [["  architecture", "SASS", "PTX"]]
        for arch, row in audited.device_code.items():
            sizes = [f"{row[kind] / 1e6:.2f} MB" if row[kind] else "-" for kind in ("sass", "ptx")]
            rows.append([f"  {arch}", *sizes])
        table(rows)
        _kernels(audited)
    click.echo(f"  libraries   {', '.join(audited.libraries) or 'none'}")
    click.echo(
        f"  symbols     {', '.join(f'{number} of {title}' for title, number in audited.symbols.items()) or 'none'}"
    )
    click.echo(f"  signature   {audited.signature}")
    for line in origins(audited.provenance):
        click.echo(line)
    click.echo(f"  rebuild     {audited.rebuild}")
    _section(
        "ops", [f"{op['schema']}{'' if op['fake'] else '  (no fake in Python)'}" for op in audited.ops] or ["none"]
    )


def _kernels(audited: AuditedVariant) -> None:
    """Print the kernels by template, with their number."""
    names = (declaration.replace("(anonymous namespace)::", "") for declaration in audited.kernels)
    templates = Counter(re.split("[<(]", name)[0].split()[-1] for name in names)
    lines = [f"{name} ({number})" if number > 1 else name for name, number in templates.items()]
    _section(counted(len(audited.kernels), "kernel"), lines)


def _section(title: str, lines: Sequence[str]) -> None:
    click.echo(f"  {title}:")
    for line in lines[:_LINES]:
        click.echo(f"    {line}")
    if len(lines) > _LINES:
        click.echo(f"    ... and {len(lines) - _LINES} more; --json has all")
