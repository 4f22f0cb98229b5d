"""`kernel-builder report`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernel_builder.measure import tables
from kernel_format.errors import ConfigError
from kernel_judge.search import run_page
from kernel_judge.search.run_report import attempt_lines, make_report, notes, summary_table


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in (value or "").split(",") if word.strip()]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{value!r} is not a list of numbers", where="--k", hint="write it as 1,5,10")
    return tuple(sorted({int(word) for word in words}))


@click.command()
@click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--k", "ks", callback=_numbers, metavar="K,...", help="The values of k. [default: 1, 2, 4, 8, ...]")
@click.option(
    "--against",
    "peer",
    type=click.Choice(["eager", "compile", "max-autotune"]),
    default="eager",
    show_default=True,
    help="What speeds are relative to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page with plots."
)
def report(runs: tuple[Path, ...], ks: tuple[int, ...], peer: str, as_json: bool, page: Path | None) -> None:
    """Say what searches have found: by agent, context and level.

    RUN is the directory of a search, its --run; several are reported together, one task each. pass@k is the
    probability that one of k attempts is right, speedup@k the expected speed of the best of k, fast_p the share of
    attempts that are right and more than p times as fast as the reference. A wrong or slow kernel counts as 1.0
    wherever speeds are averaged: the reference is used in its place. The log of a search that still runs can be read,
    too.

    \b
    kernel-builder report search-softmax
    kernel-builder report runs/* --k 1,5,10 --against compile --html report.html
    """
    made = make_report(runs, peer, ks)
    if page:
        run_page.save_page(made, page)
    if as_json:
        click.echo(json.dumps(made.as_dict()))
        return
    click.echo(tables.as_text(summary_table(made)) + "\n")
    for line in [*notes(made), "", *attempt_lines(made)]:
        click.echo(line)
