"""`kernel-builder doctor`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.option("--cuda-home", type=click.Path(path_type=Path), help="A CUDA toolkit of yours. [default: $CUDA_HOME]")
@click.option("--cxx", metavar="PROGRAM", help="The host compiler. [default: $CXX, else g++]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(cuda_home: Path | None, cxx: str | None, as_json: bool) -> None:
    """Say what this machine has, what is missing for which build, and the command that mends it.

    Asks no network. Exits with 0 when CPU and CUDA kernels can be built here, else with 1.
    """
    from kernel_builder.toolchain import Toolchains
    from kernel_builder.toolchain.survey import BUILDS, ready, survey

    findings = survey(Toolchains(cuda_home=cuda_home, cxx=cxx))
    verdict = {build: ready(findings, build) for build in BUILDS}
    if as_json:
        rows = [{**asdict(finding), "ok": finding.ok} for finding in findings]
        click.echo(json.dumps({"ready": verdict, "findings": rows}, indent=2))
    else:
        for finding in findings:
            if finding.ok:
                click.echo(f"{click.style('yes', fg='green')}  {finding.name:<14} {finding.value}")
                continue
            needed = [build for build in finding.needed_for if build in BUILDS]
            mark = click.style("NO ", fg="red") if needed else click.style("no ", fg="yellow")
            purpose = f"needed for {', '.join(finding.needed_for)}: " if finding.needed_for else ""
            click.echo(f"{mark}  {finding.name:<14} {purpose}{finding.mend}")
        for build, possible in verdict.items():
            click.echo(f"{build} builds: {'ready' if possible else 'not possible yet'}")
    sys.exit(0 if all(verdict.values()) else 1)
