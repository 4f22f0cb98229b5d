"""The command line itself: help, completion, the output of errors, and progress on a terminal and in logs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_builder.cli import main
from kernel_builder.progress import PrintableStream, shown
from tests.support.cli import expect, invoke
from tests.support.files import write_files

COMMANDS = sorted(main.list_commands(None))  # type: ignore[arg-type]
HIDDEN = ["build-and-copy", "build-and-upload"]


@pytest.mark.parametrize("command", [*COMMANDS, *HIDDEN])
def test_every_command_has_help(command: str) -> None:
    assert len(expect(0, "", command, "--help").output.splitlines()) > 5


def test_mistyped_commands_and_options_get_a_hint() -> None:
    for words, message in (
        (["buidl"], "No such command 'buidl': did you mean `build`?"),
        (["build", "--keep-generated", "--out", "x"], "'--keep-generated' requires a path, and '--out' is an option"),
        (["upload", "/no", "--output-json", "--dry-run"], "there is no such file"),
    ):
        expect(2, message, *words)


def test_a_command_whose_import_fails_states_the_reason_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernel_judge.cli.judge_command", None)
    done = expect(4, "", "judge", "candidate.py")
    assert done.output.startswith("error: judge: cannot be imported: ")
    assert "judge  " in expect(0, "cannot be imported", "--help").stdout


def test_completion_completes() -> None:
    # The request that the script makes at the prompt `kernel-builder build --var`.
    builder = Path(sys.executable).with_name("kernel-builder")
    words = {"COMP_WORDS": "kernel-builder build --var", "COMP_CWORD": "2"}
    asked = {**words, "_KERNEL_BUILDER_COMPLETE": "bash_complete"}
    done = subprocess.run([builder], capture_output=True, text=True, check=False, env=asked)
    assert "--variant" in done.stdout


def test_errors_are_text_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["check-config", str(tmp_path)]
    printed = invoke(*command)
    assert printed.exit_code == 2
    assert printed.stdout == ""
    assert printed.stderr.startswith("error: ")
    assert "hint: " in printed.stderr
    monkeypatch.setattr(sys, "argv", ["kernel-builder", *command, "--json"])
    answer = json.loads(invoke(*command, "--json").stdout)
    assert (answer["error"], answer["where"]) == ("ConfigError", str(tmp_path / "build.toml"))
    assert "there is no such file" in answer["message"] and "init" in answer["hint"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_last_report_and_keeps_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    with shown(stream) as progress:
        progress.advance("building", 1, 2, detail="a long title of a step")
        progress.say("a message that is longer than the terminal")
        progress.advance("nvcc.whl", 500_000, 2_000_000, unit="bytes")
    assert [line.rpartition("\r\033[K")[2] for line in stream.getvalue().split("\n")] == [
        "a message that is longer than the terminal",
        "",
    ]
    assert "\r\033[K[1/2] a lon\r" in stream.getvalue()


# Commands of terminals and of CI services.
ATTACKS = [
    *("\x1b[2J", "\x1b]0;title\x07", "\r\x1b[K", "\x9b2J"),
    *("\n::error::x", "\n  ::add-path::/x", "\n##[command]", "\u202e"),
]


@pytest.mark.attack
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("options", [{"color": True}, {}])
def test_a_projects_text_is_printed_without_commands(tmp_path: Path, attack: str, options: dict[str, bool]) -> None:
    stream = io.StringIO()
    PrintableStream(stream).writelines(["kernel", attack])
    assert attack not in stream.getvalue()
    project = tmp_path / f"kernel{attack.replace('/', '-')}"
    write_files(project, {"build.toml": "[general]\n"})
    done = expect(2, "kernel", "check-config", project, **options)
    for command in ("\x1b[2J", "\x1b]", "\r", "\x9b", "\u202e", "##["):
        assert command not in done.output
    assert not [line for line in done.output.splitlines() if line.strip().startswith("::")]
