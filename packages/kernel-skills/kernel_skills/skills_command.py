"""`kernel-builder skills`: install skills for coding agents, and measure how much they help."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from kernel_format.errors import ConfigError
from kernel_judge.api import SearchRequest
from kernel_judge.cli.options import minutes_option, notify, require_torch
from kernel_skills.catalog import find_skill, read_skill
from kernel_skills.installation import AGENT_TOOLS, install_skill, skill_directory

_PATH = click.Path(path_type=Path)
_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_tries_option = click.option(
    "-k",
    "tries",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Tries of each task with the skill, and as many without it.",
)
_jobs_option = click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Tries at a time. [default: one for each core]"
)


@click.group()
def skills() -> None:
    """Teach coding agents to write kernels, and measure whether it helps.

    A skill is a short text for agents such as Claude Code and Codex, with references that they read when they need
    them (https://agentskills.io).

    \b
    kernel-builder skills add --agent claude                install the skill cuda-kernels in this project
    kernel-builder skills add --agent codex --global        install it for all projects
    kernel-builder skills eval cuda-kernels --tasks tasks --agent 'claude -p'
    kernel-builder skills distil run --agent 'claude -p' -o skills/my-skill
    """


@skills.command()
@click.argument("name", default="cuda-kernels")
@click.option(
    "--agent",
    "tools",
    multiple=True,
    type=click.Choice(list(AGENT_TOOLS)),
    help="The agent whose directory of skills is used; may be repeated.",
)
@click.option("--global", "globally", is_flag=True, help="For all projects of the user.")
@click.option("--dest", "destination", type=_DIRECTORY, metavar="DIR", help="Another directory of skills.")
@click.option("--force", is_flag=True, help="Also replace files that differ.")
def add(name: str, tools: tuple[str, ...], globally: bool, destination: Path | None, force: bool) -> None:
    """Install the skill NAME (default: cuda-kernels).

    An installed skill with other files, your own edits or those of another release, is replaced only with --force.

    \b
    kernel-builder skills add --agent claude
    kernel-builder skills add cuda-kernels --agent codex --global
    kernel-builder skills add --dest my-agent/skills
    """
    if bool(destination) == bool(tools) or (destination and globally):
        raise ConfigError(
            "expected either --agent or --dest, and --global only with --agent",
            where="skills add",
            hint=f"add --agent {', --agent '.join(AGENT_TOOLS)} or --dest DIR",
        )
    directories = [destination] if destination else [skill_directory(tool, globally=globally) for tool in tools]
    for result, place in install_skill(find_skill(name), directories, force=force):
        click.echo(f"{result}: {place}")


def _template(agent: str, run: Path, minutes: float, jobs: int | None) -> SearchRequest:
    limits = SearchRequest.limits._replace(seconds=minutes * 60)
    return SearchRequest(task=Path(), run=run, agents=(agent,), jobs=jobs or os.cpu_count() or 1, limits=limits)


@skills.command("eval")
@click.argument("skill", metavar="SKILL")
@click.option(
    "--tasks",
    type=_PATH,
    metavar="DIR",
    required=True,
    help="A directory with tasks as `judge` takes them, or one task.",
)
@click.option("--agent", metavar="COMMAND", required=True, help="The agent, as for `search`.")
@click.option(
    "--run",
    type=_DIRECTORY,
    metavar="DIR",
    help="The directory of the evaluation. [default: eval-<skill>]",
)
@_tries_option
@minutes_option
@_jobs_option
def evaluate(
    skill: str, tasks: Path, agent: str, run: Path | None, tries: int, minutes: float, jobs: int | None
) -> None:
    """Measure how much SKILL helps an agent: the name of a skill, or the directory of one.

    The agent does each task -k times with the skill and -k times without it, under the same limits and the same judge.
    pass@1, speedup@1 and time are compared. The exit
    status is 0 if the skill helps by more than chance explains, and 1 if there is no measurable help.

    The same command continues an interrupted evaluation. Every try is a call of the agent, with its costs.

    \b
    kernel-builder skills eval cuda-kernels --tasks KernelBench/level1 --agent 'claude -p'
    kernel-builder skills eval ./my-skill --tasks tasks --agent ./local-model.sh -k 10
    """
    evaluated = read_skill(Path(skill)) if Path(skill).is_dir() else find_skill(skill)
    template = _template(agent, run or Path(f"eval-{evaluated.name}"), minutes, jobs)
    require_torch()
    from kernel_skills.benefit import HELPS, benefit_lines, find_tasks, measure_benefit

    benefit = measure_benefit(evaluated, find_tasks(tasks), tries, template, notify)
    click.echo("\n".join(benefit_lines(benefit)))
    if benefit.conclusion != HELPS:
        sys.exit(1)


@skills.command()
@click.argument("source", metavar="RUN", type=_DIRECTORY)
@click.option("--agent", metavar="COMMAND", required=True, help="The agent that writes the skill, as for `search`.")
@click.option(
    "-o",
    "--output",
    "target",
    type=_PATH,
    metavar="DIR",
    required=True,
    help="The directory of the new skill; its name is the name of the skill.",
)
@click.option("--student", metavar="COMMAND", help="The agent that the skill should help. [default: that of --agent]")
@click.option(
    "--tasks",
    type=_PATH,
    metavar="DIR",
    help="The tasks of the evaluation. [default: the task of the search, which the skill's author has seen solved]",
)
@_tries_option
@minutes_option
@_jobs_option
def distil(
    source: Path,
    agent: str,
    target: Path,
    student: str | None,
    tasks: Path | None,
    tries: int,
    minutes: float,
    jobs: int | None,
) -> None:
    """Let an agent write a skill from the best tries of the search RUN; keep it if it helps the student.

    The agent receives the fastest right candidates with their logs and verdicts, and the reasons for which others were
    wrong. The new skill is evaluated as `skills eval` does, and written to DIR only if it helps; otherwise the exit
    status is 1, and DIR does not exist. The same command continues an interrupted run.

    \b
    kernel-builder skills distil search-softmax --agent 'claude -p' -o skills/softmax
    kernel-builder skills distil search-softmax --agent 'claude -p' -o skills/softmax --student ./small.sh --tasks tasks
    """
    require_torch()
    from kernel_skills.benefit import benefit_lines, find_tasks
    from kernel_skills.distillation import distil as write_and_evaluate

    template = _template(student or agent, source / f"distil-{target.resolve().name}", minutes, jobs)
    distilled = write_and_evaluate(source, target, agent, find_tasks(tasks) if tasks else [], tries, template, notify)
    click.echo("\n".join(benefit_lines(distilled.benefit)))
    if not tasks:
        click.echo("These are tries of the task that the skill was written from; --tasks names others.")
    kept, written = distilled.kept, distilled.skill.directory
    click.echo(f"Kept: {kept}" if kept else f"Not kept. The text is in {written}")
    if not distilled.kept:
        sys.exit(1)
