"""`kernel-builder completions SHELL`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kernel_builder.cli import main


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completions(shell: str) -> None:
    """Print a completion script for a shell.

    \b
    bash:  kernel-builder completions bash > ~/.local/share/bash-completion/completions/kernel-builder
    zsh:   kernel-builder completions zsh > "${fpath[1]}/_kernel-builder"
    fish:  kernel-builder completions fish > ~/.config/fish/completions/kernel-builder.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(main, {}, "kernel-builder", "_KERNEL_BUILDER_COMPLETE").source())
