"""`kernel-builder judge`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from kernel_format.errors import ConfigError
from kernel_format.signatures import read_private_key
from kernel_judge.cli.options import json_option, notify, require_torch
from kernel_judge.judge.verdict import EXIT_STATUS

_PATH = click.Path(path_type=Path)
_PEERS = ("eager", "compile", "max-autotune")


def _peers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return _PEERS
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    for name in names:
        if name not in _PEERS:
            raise ConfigError(f"{name!r} is not a peer; expected names from {', '.join(_PEERS)}", where="--against")
    return names


@click.command()
@click.argument("candidate", metavar="CANDIDATE", type=_PATH)
@click.option("--task", metavar="TASK", type=_PATH, required=True, help="A task in a public format, as below.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: the task's, or cuda if there is a GPU]")
@click.option("--inputs", type=click.IntRange(min=1), default=100, show_default=True, help="Random inputs to check.")
@click.option(
    "--rounds", type=click.IntRange(min=0), default=15, show_default=True, help="Samples of each time; 0: no times."
)
@click.option(
    "--against",
    "peers",
    callback=_peers,
    metavar="NAME,...",
    help="Peers to time: eager, compile, max-autotune. On a CPU, peers that compile for too long are left out. "
    "[default: all]",
)
@click.option(
    "--inputs-of-task-only", is_flag=True, help="Check only the task's own inputs and parameters, as KernelBench does."
)
@click.option(
    "--no-build", "is_built", is_flag=True, help="Judge the packages in CANDIDATE/build without building them."
)
@click.option(
    "--sandbox", type=click.Choice(["bubblewrap", "landlock", "process"]), help="[default: the first permitted one]"
)
@click.option(
    "--sign",
    "key_file",
    type=_PATH,
    metavar="KEY",
    help="Print a result for `report --leaderboard`: the verdict, candidate and task, signed with this private key "
    "(Ed25519, from ssh-keygen or openssl).",
)
@json_option
def judge(candidate: Path, task: Path, as_json: bool, key_file: Path | None, **options: Any) -> None:
    """Check a candidate's results against a task's reference, and measure its speed.

    TASK is a file or directory of KernelBench, GPU MODE, FlashInfer-Bench, SOL-ExecBench or BackendBench. CANDIDATE has
    the form of that format, such as submission.py or solution.json, or is a Python file that defines ModelNew, or a
    kernel project with such a file beside its build.toml, which is built first.

    The candidate runs in another process, in a sandbox without network, and receives inputs only. This process computes
    the reference in float64, compares the results, and measures time with its own clock. The exit status is 0 if the
    candidate is right, 1 if it is wrong, 2 if the task or the candidate cannot be read, and 11 if this machine cannot
    judge the candidate.

    \b
    kernel-builder judge candidate.py --task KernelBench/level1/36_RMSNorm_.py
    kernel-builder judge my-kernel/ --task tasks/rms_norm.py --json
    kernel-builder judge submission.py --task problems/vectoradd_py --inputs 10 --rounds 0
    kernel-builder judge candidate.py --task task.py --sign judge-key > results/candidate.json
    """
    require_torch()
    ask = partial(click.prompt, "Passphrase", hide_input=True, err=True)
    key = read_private_key(key_file, ask) if key_file else None
    from kernel_judge.judge.judgement import JudgeRequest
    from kernel_judge.judge.judgement import judge as judge_candidate
    from kernel_judge.leaderboard.result import signed_result

    verdict = judge_candidate(JudgeRequest(candidate, task, **options), notify)
    if key:
        click.echo(signed_result(verdict, candidate, task, key))
    elif as_json:
        click.echo(verdict.to_json())
    else:
        without = f", without {' and '.join(verdict.missing_peers)}" if verdict.missing_peers else ""
        where = f"on {verdict.device}, sandbox {verdict.sandbox}, {verdict.seconds:.1f} s{without}"
        click.echo("\n  ".join([f"{verdict.verdict}: {verdict.task}, {where}", *verdict.lines()]))
    sys.exit(EXIT_STATUS[verdict.verdict])
