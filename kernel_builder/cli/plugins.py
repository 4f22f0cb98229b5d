"""Groups of commands that other distributions add to.

A distribution adds a command by an entry point, whose name is the command's:

    [project.entry-points."kernel_builder.commands"]
    judge = "kernel_judge.cli.judge_command:judge"

Entry points are looked up for `--help`, and for names that are not commands of the builder itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points as find_entry_points
from typing import Any

import click

from kernel_format.errors import ToolchainError


class _Missing(click.Command):
    """A command that cannot be imported. Its help is the reason."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        raise ToolchainError(str(self.help), where=self.name, hint="install the missing module with pip")


class PluginGroup(click.Group):
    """A group that imports its commands on first use, its own and those of other distributions.

    Attributes:
        own: Command -> the module and function of `kernel_builder.cli` that it runs, as `build_command.build`.
        hidden_commands: The same for commands that `list_commands` leaves out.
        entry_points: The group of entry points that add commands.
    """

    def __init__(
        self,
        *args: Any,
        own: Mapping[str, str],
        entry_points: str,
        hidden_commands: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.own = own
        self.hidden_commands = hidden_commands or {}
        self.entry_points = entry_points

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.own, *sorted(find_entry_points(group=self.entry_points).names)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if target := self.own.get(name) or self.hidden_commands.get(name):
            module, _, function = target.partition(".")
            command = getattr(importlib.import_module(f"kernel_builder.cli.{module}"), function)
        elif plugins := tuple(find_entry_points(group=self.entry_points, name=name)):
            try:
                command = plugins[0].load()
            except ImportError as error:  # --help still lists all commands
                return _Missing(name, help=f"cannot be imported: {error}")
        else:
            return None
        assert isinstance(command, click.Command)
        return command
