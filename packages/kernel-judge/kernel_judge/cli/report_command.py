"""`kernel-builder report`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernel_judge.cli.options import json_option
from kernel_judge.search.run_report import attempt_lines, make_report, summary_lines


@click.command()
@click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--against",
    "peer",
    type=click.Choice(["eager", "compile", "max-autotune"]),
    default="eager",
    show_default=True,
    help="The peer that speeds are relative to.",
)
@json_option
def report(runs: tuple[Path, ...], peer: str, as_json: bool) -> None:
    """Report the results of searches by agent and context.

    RUN is the directory of a search, its --run; several are reported together, one task each. pass@k is the
    probability that one of k attempts is right, speedup@k the expected speed of the best of k. A wrong or slow kernel
    counts as 1.0: the reference is used in its place. A search that still runs can be reported, too.

    \b
    kernel-builder report search-softmax
    kernel-builder report runs/* --against compile
    """
    result = make_report(runs, peer)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    for line in [*summary_lines(result), "", *attempt_lines(result)]:
        click.echo(line)
