"""Text of projects, Hubs and agents commands neither the terminal nor the CI service that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_builder.cli import main

pytestmark = pytest.mark.attack

ATTACKS = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\r\x1b[K",
    "\x9b2J",
    "\n::error::x",
    "\n  ::add-path::/x",
    "\n##[command]",
    "\u202e",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("options", [{"color": True}, {}])
def test_a_projects_text_is_printed_without_commands(tmp_path: Path, attack: str, options: dict[str, bool]) -> None:
    project = tmp_path / f"kernel{attack.replace('/', '-')}"
    project.mkdir()
    (project / "build.toml").write_text("[general]\n")
    done = CliRunner().invoke(main, ["check-config", str(project)], **options)
    assert done.exit_code == 2 and "kernel" in done.stderr
    for command in ("\x1b[2J", "\x1b]", "\r", "\x9b", "\u202e", "##["):
        assert command not in done.output
    assert not [line for line in done.output.splitlines() if line.strip().startswith("::")]
