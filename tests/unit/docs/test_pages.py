"""The commands, options and error messages of the documentation exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator

import click

from kernel_builder.cli import main
from tests.support.places import ROOT

_LINE = re.compile(r"^ {4,}(?:\.venv/bin/|\w+=\S+ )*(kernel-builder|kernel-hub) (.*)$", re.MULTILINE)
_END = {"--", "&&", "|", ";", "2>>"}
# The messages of Torch and of click.
_FOREIGN = {"Could not run", "with arguments from the 'CPU' backend", "No such command"}


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield each file with the words of each of its command lines, up to the end of the command."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for file in listed.splitlines():
        for program, rest in _LINE.findall((ROOT / file).read_text()):
            words = shlex.split(rest.rstrip("\\"), comments=True)
            end = next((i for i, word in enumerate(words) if word in _END), len(words))
            yield file, (["hub"] if program == "kernel-hub" else []) + words[:end]


def test_commands_and_options_exist() -> None:
    lines = list(command_lines())
    assert len(lines) > 100
    for file, words in lines:
        command: click.Command | None = main
        rest = iter(words)
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), next(rest))
        assert command, f"{file}: {' '.join(words)}"
        options = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
        for word in rest:
            assert not word.startswith("-") or word.partition("=")[0] in options, f"{file}: {' '.join(words)}: {word}"


def test_named_tests_exist() -> None:
    pattern = re.compile(r"((?:kernels/\w+/tests|tests/\w+)/[\w/-]+\.py)(?:::(\w+))?")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for path, name in pattern.findall(page.read_text()):
            assert name in (ROOT / path).read_text(), f"{page.name}: {path}::{name}"


def test_troubleshooting_quotes_messages() -> None:
    files = ("kernel_builder/*.py", "kernel_builder/*.toml", "packages/*/kernel_*/*.py")
    command = ["git", "grep", "-hI", "", "--", *files]
    sources = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # the parts of a string
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Exit statuses")[0]
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    quoted = {text.strip(", ") for cell in cells for text in re.findall(r"`([^`]+)`", cell)}
    assert len(quoted) > 20
    assert not [text for text in quoted - _FOREIGN if text not in joined]
