"""`kernel-builder doctor`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from kernel_builder.cli.shared_options import json_option
from kernel_builder.toolchain import Toolchains
from kernel_builder.toolchain.survey import BUILDS, ready, survey


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check that this machine can build kernels.

    Lists installed and missing requirements for each kind of build, with a command that installs them. Uses no network.
    A CUDA toolkit in $CUDA_HOME is checked too.
    The exit code is 0 if both CPU and CUDA kernels can be built, or else 1.

    \b
    kernel-builder doctor
    """
    requirements = survey(Toolchains())
    verdict = {build: ready(requirements, build) for build in BUILDS}
    if as_json:
        rows = [{**asdict(requirement), "ok": requirement.ok} for requirement in requirements]
        click.echo(json.dumps({"ready": verdict, "findings": rows}, indent=2))
    else:
        for requirement in requirements:
            if requirement.ok:
                click.echo(f"{click.style('yes', fg='green')}  {requirement.name:<28} {requirement.value}")
                continue
            needed = [build for build in requirement.needed_for if build in BUILDS]
            mark = click.style("NO ", fg="red") if needed else click.style("no ", fg="yellow")
            purpose = f"needed for {', '.join(requirement.needed_for)}: " if requirement.needed_for else ""
            click.echo(f"{mark}  {requirement.name:<28} {purpose}{requirement.hint}")
        for build, possible in verdict.items():
            click.echo(f"{build} builds: {'ready' if possible else 'not possible yet'}")
    sys.exit(0 if all(verdict.values()) else 1)
