"""`kernel-builder search`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from kernel_judge.cli.options import minutes_option, notify, require_torch
from kernel_judge.judge.verdict import Speedup
from kernel_judge.search.local_judge import JUDGE_COMMAND
from kernel_judge.search.run_log import REFERENCE_PEER
from kernel_judge.search.run_report import attempt_lines, make_report
from kernel_judge.search.search_request import SearchRequest, parse_context

_PATH = click.Path(path_type=Path)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("task", metavar="TASK", type=_PATH)
@click.option(
    "--agent",
    "agents",
    multiple=True,
    required=True,
    metavar="COMMAND",
    help="A command that writes a kernel; may be repeated: attempts use the agents in turn.",
)
@click.option("-n", "--attempts", type=click.IntRange(min=1), help="Attempts in all. [default: one for each agent]")
@click.option(
    "--tries", type=click.IntRange(min=1), default=1, show_default=True, help="Calls of the agent in each attempt."
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    callback=lambda ctx, param, values: tuple(map(parse_context, values)) or ((),),
    metavar="NAME,...",
    help="Files for the agents besides the task: skill, reference, or none; may be repeated to compare. "
    "[default: none]",
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="A file of --context reference; may be repeated.",
)
@click.option("--run", type=_DIRECTORY, metavar="DIR", help="The search's directory. [default: search-<task>]")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Attempts at a time; judging is one at a time on each device. "
    "[default: one for each core]",
)  # fmt: skip
@click.option(
    "--against", metavar="NAME,...", help="Peers that the judge times; eager alone is quickest. [default: all]"
)
@click.option("--ray", metavar="ADDRESS", help="Judge on the machines of this Ray cluster.")
@minutes_option
def search(
    task: Path,
    agents: tuple[str, ...],
    attempts: int | None,
    run: Path | None,
    jobs: int | None,
    against: str | None,
    minutes: float,
    **options: Any,
) -> None:
    """Let agents write a kernel for a task, and keep the best.

    TASK is a problem file or directory, as for `judge`. An agent is any command. It runs in its own directory with the
    task and a new kernel project, reads its instructions from standard input, and may run `./judge` for a verdict. Its
    candidate.py or kernel/ is judged. The fastest right candidate is judged once more, and written to DIR/best, which
    `upload` publishes. The exit status is 1 if no candidate is right and faster than the reference.

    DIR/log.jsonl records all events. The same command with the same --run continues an interrupted search. An agent
    runs with your permissions: use a container if you would not run its commands yourself.

    \b
    kernel-builder search task.py --agent 'claude -p --dangerously-skip-permissions' -n 8 --tries 5
    kernel-builder search task.py --agent 'codex exec -' --agent ./mine.sh --context none --context skill
    kernel-builder report search-task
    """
    require_torch()
    from kernel_judge.search.search_run import run_search

    result = run_search(
        SearchRequest(
            task=task,
            run=run or Path(f"search-{task.resolve().stem}"),
            agents=agents,
            attempts=attempts or len(agents),
            jobs=jobs or os.cpu_count() or 1,
            judge=(*JUDGE_COMMAND, "--against", against) if against else JUDGE_COMMAND,
            limits=SearchRequest.limits._replace(seconds=minutes * 60),
            **options,
        ),
        notify,
    )
    for line in attempt_lines(make_report([result.run], REFERENCE_PEER)):
        click.echo(line)
    if best := result.best:
        click.echo(f"Best: attempt {best['attempt']}, try {best['try']}")
        for peer, speed in best["verdict"]["speed"].items():
            click.echo(f"  {Speedup(**speed)} times the speed of {peer} in its verification, the second verdict")
        click.echo(f"It is in {result.run / 'best'}. Next:\n  kernel-builder report {result.run}")
        click.echo(f"  kernel-builder build-and-upload {result.run / 'best'} --repo-id ORG/NAME")
    else:
        click.echo(f"No candidate is right and faster than the reference. Next:\n  kernel-builder report {result.run}")
        sys.exit(1)
