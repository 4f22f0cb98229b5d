"""`kernel-builder report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from kernel_format.errors import ConfigError
from kernel_format.signatures import read_signers
from kernel_judge.cli.options import json_option, notify
from kernel_judge.leaderboard.page import run_results, write_site
from kernel_judge.leaderboard.result import judge_again as judge_again_best
from kernel_judge.leaderboard.result import read_results
from kernel_judge.search.run_report import attempt_lines, make_report, summary_lines

_DIRECTORY = click.Path(file_okay=False, resolve_path=True, path_type=Path)
_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=_EXISTING)
@click.option(
    "--against",
    "peer",
    type=click.Choice(["eager", "compile", "max-autotune"]),
    default="eager",
    show_default=True,
    help="The peer that speeds are relative to.",
)
@click.option(
    "--leaderboard", type=_EXISTING, metavar="DIR", help="Rank the results DIR/*.json of `judge` in place of searches."
)
@click.option("--out", type=_DIRECTORY, metavar="SITE", help="Write a static page, in place of an earlier page only.")
@click.option(
    "--signer",
    "signers",
    multiple=True,
    metavar="FILE",
    help="A judge's public key: only results that it has signed are ranked; may be repeated.",
)
@click.option(
    "--judge-again", type=click.IntRange(min=1), metavar="N", help="Judge each task's best N that --signer has signed."
)
@json_option
def report(
    runs: tuple[Path, ...],
    peer: str,
    leaderboard: Path | None,
    out: Path | None,
    signers: tuple[str, ...],
    judge_again: int | None,
    as_json: bool,
) -> None:
    """Report the results of searches by agent and context, or rank judged results.

    RUN is the directory of a search, its --run; several are reported together, one task each. pass@k is the
    probability that one of k attempts is right, speedup@k the expected speed of the best of k. A wrong or slow kernel
    counts as 1.0: the reference is used in its place. A search that still runs can be reported, too.

    With --judge-again, the exit status is 1 if a second verdict differs, or if the intervals of the speeds do not
    overlap. It is 2 if a file of DIR is not a result; such files are skipped.

    \b
    kernel-builder report search-softmax --out site
    kernel-builder report runs/* --against compile
    kernel-builder report --leaderboard results --signer judge.pub --out site
    kernel-builder report --leaderboard results --signer judge.pub --judge-again 3
    """
    if bool(runs) == bool(leaderboard) or not (runs or out or judge_again) or (runs and (judge_again or signers)):
        raise ConfigError(
            "expected directories of searches, or --leaderboard DIR with --out or --judge-again",
            where="report",
            hint="kernel-builder report RUN, or kernel-builder report --leaderboard DIR --out SITE",
        )
    if judge_again and not signers:
        raise ConfigError(
            "expected --signer beside --judge-again: the code of a task runs outside of the sandbox",
            where="report",
            hint="name the public key of the judge that has signed the results",
        )
    if leaderboard:
        results, faults = read_results(leaderboard, read_signers(signers))
        for fault in faults:
            notify(f"warning: left out: {fault}")
        if out:
            write_site(results, out, "Leaderboard", only_valid=bool(signers))
        comparisons = list(judge_again_best(results, judge_again)) if judge_again else []
        for comparison in comparisons:
            click.echo(comparison.text)
        sys.exit(2 if faults else 0 if all(comparison.agrees for comparison in comparisons) else 1)
    result = make_report(runs, peer)
    if out:
        write_site(run_results(result), out, f"Searches: {', '.join(run.name for run in runs)}")
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    for line in [*summary_lines(result), "", *attempt_lines(result)]:
        click.echo(line)
