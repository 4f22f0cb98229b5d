"""The command line itself: help, completion, and the output of errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_builder import __version__
from kernel_builder.build.buildable import UnavailableVariant
from kernel_builder.build_summary import BuildSummary, BuiltPackage
from kernel_builder.cli import main
from kernel_builder.cli.build_command import print_summary

from .newest import BEFORE, NEWEST

COMMANDS = sorted(main.list_commands(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = CliRunner().invoke(main, [command, "--help"])
    assert done.exit_code == 0
    assert len(done.output.splitlines()) > 5


def test_the_list_of_commands_describes_each() -> None:
    done = CliRunner().invoke(main, ["--help"])
    listed = done.output.partition("Commands:")[2].splitlines()
    assert {line.split()[0] for line in listed if line.strip()} == set(COMMANDS)
    assert all(len(line.split()) > 3 for line in listed if line.strip())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_completes(shell: str) -> None:
    script = CliRunner().invoke(main, ["completions", shell])
    assert "_KERNEL_BUILDER_COMPLETE" in script.output
    if shell != "bash":
        return
    # The request that the script makes at the prompt `kernel-builder build --var`.
    builder = Path(sys.executable).with_name("kernel-builder")
    words = {"COMP_WORDS": "kernel-builder build --var", "COMP_CWORD": "2", "_KERNEL_BUILDER_COMPLETE": "bash_complete"}
    done = subprocess.run([builder], capture_output=True, text=True, check=False, env=words)
    assert "--variant" in done.stdout


def test_version() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize("arguments", [["build", "--nonsense"], ["nonsense"], ["build", "--jobs", "0"]])
def test_wrong_usage_exits_with_2_and_shows_the_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "Usage:" in done.output


def test_errors_are_text_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["check-config", str(tmp_path)]
    words = CliRunner().invoke(main, command)
    assert words.exit_code == 2
    assert words.stdout == ""
    assert words.stderr.startswith("error: ")
    assert "hint: " in words.stderr
    monkeypatch.setattr(sys, "argv", ["kernel-builder", *command, "--json"])
    answer = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert answer["error"] == "ConfigError"
    assert answer["where"] and answer["hint"]


def test_what_is_not_loaded_for_another_torch_says_what_would_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def built(release: str, passed: tuple[str, ...]) -> BuiltPackage:
        skipped = (
            {} if passed else {"load": f"Torch version ({release}) does not match environment Torch version (2.13)"}
        )
        name = f"torch{release.replace('.', '')}-cxx11-cpu-x86_64-linux"
        return BuiltPackage("relu", name, tmp_path, "_relu", "built", (), 2048, passed, skipped, {}, None)

    newest = (built(str(BEFORE), ()), built(str(NEWEST), ()))
    advice = "    `--variant torch213-cxx11-cpu-x86_64-linux` builds one for the Torch that is installed"
    print_summary(BuildSummary(newest, (), (), {}, 0, 0, None, 0.0))
    assert advice in capsys.readouterr().out.splitlines()
    print_summary(BuildSummary((*newest, built("2.13", ("load",))), (), (), {}, 0, 0, None, 0.0))
    assert advice not in capsys.readouterr().out.splitlines()


def test_the_reason_why_variants_are_not_built_here_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reason, hint = "for aarch64-linux, and this build is for x86_64-linux", "add `--platform aarch64-linux`"
    elsewhere = [UnavailableVariant("relu", name, reason, hint) for name in ("torch-b", "torch-c")]
    built = BuiltPackage("relu", "torch-a", tmp_path, "_relu", "built", (), 2048, ("load",), {}, {}, None)
    print_summary(BuildSummary((built,), (), tuple(elsewhere), {}, 0, 0, None, 0.0))
    assert capsys.readouterr().out.splitlines()[:5] == [
        f"not built: relu/torch-b, relu/torch-c: {reason}",
        f"    {hint}",
        "variant     status  size   checks    binary shared with",
        "torch-a     built   2 KiB  1 passed",
        "2 variants  not here",
    ]
