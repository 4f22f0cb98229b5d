"""`kernel-builder doctor`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from kernel_builder.cli.shared_options import json_option, printable, table
from kernel_builder.hub.advice import Advice, advise
from kernel_builder.toolchain import Toolchains
from kernel_builder.toolchain.survey import BUILDS, ready, survey


@click.command()
@click.option(
    "--for", "kernel", metavar="REPO[@REVISION]", help="Check that `get_kernel` finds a variant of this kernel."
)
@json_option
def doctor(kernel: str | None, as_json: bool) -> None:
    """Check that this machine can build kernels, or with --for that it can load one.

    Lists installed and missing requirements for each kind of build, with a command that installs them. Uses no network.
    A CUDA toolkit in $CUDA_HOME is checked too.
    The exit code is 0 if both CPU and CUDA kernels can be built, or else 1.

    With --for, the command applies the client's rules, and if no variant loads, lists the smallest changes of this
    environment that make the kernel load. The exit code is 0 if it loads.

    \b
    kernel-builder doctor
    kernel-builder doctor --for kernels-community/rmsnorm@v1
    """
    if kernel is not None:
        advice = advise(kernel)
        if as_json:
            click.echo(json.dumps(asdict(advice), indent=2))
        else:
            _print(advice)
        sys.exit(0 if advice.loads else 1)
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


def _print(advice: Advice) -> None:
    printable(f"{advice.name}: {f'loads here, {advice.loads}' if advice.loads else 'no variant loads here'}")
    printable(f"here: {advice.environment}")
    if advice.options:
        table([["change", "loads"], *([" and ".join(option.changes), option.variant] for option in advice.options)])
    elif not advice.loads:
        printable("no change makes it load: there is no variant for this platform")
    if advice.conflict:
        printable(f"transformers uses kernels with {advice.conflict} only: pip install '{advice.conflict}'")
