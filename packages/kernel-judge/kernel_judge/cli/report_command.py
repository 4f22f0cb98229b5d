"""`kernel-builder report`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernel_format.errors import ConfigError
from kernel_judge.cli.options import json_option
from kernel_judge.search.run_report import attempt_lines, make_report, summary_lines


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    numbers = [number.strip() for number in (value or "").split(",") if number.strip()]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(f"{value!r} is not a list of numbers", where="--k", hint="write it as 1,5,10")
    return tuple(sorted(set(map(int, numbers))))


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
    help="The peer that speeds are relative to.",
)
@json_option
def report(runs: tuple[Path, ...], ks: tuple[int, ...], peer: str, as_json: bool) -> None:
    """Report the results of searches by agent and context.

    RUN is the directory of a search, its --run; several are reported together, one task each. pass@k is the
    probability that one of k attempts is right, speedup@k the expected speed of the best of k, fast_p the share of
    attempts that are right and more than p times as fast as the reference. A wrong or slow kernel counts as 1.0
    wherever speeds are averaged: the reference is used in its place. A search that still runs can be reported, too.

    \b
    kernel-builder report search-softmax
    kernel-builder report runs/* --k 1,5,10 --against compile
    """
    result = make_report(runs, peer, ks)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    for line in [*summary_lines(result), "", *attempt_lines(result)]:
        click.echo(line)
