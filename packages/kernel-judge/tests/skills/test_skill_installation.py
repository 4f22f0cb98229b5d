"""Installing, updating, listing and removing skills: whole or not at all, and never over a user's edits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernel_builder.cli import main
from kernel_judge.skills.catalog import Skill, find_skill, read_skill
from kernel_judge.skills.installation import RECORD, inspect_skill, install_skill

PLACES = {
    "claude": (".claude/skills", ".claude/skills"),
    "codex": (".agents/skills", ".agents/skills"),
    "opencode": (".opencode/skills", ".config/opencode/skills"),
    "cursor": (".cursor/skills", ".cursor/skills"),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, which is the current directory, and a home directory."""
    for name in ("project", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "project"


def skills(*arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kernel-builder", "skills", *arguments])  # where errors look for --json
        return CliRunner().invoke(main, ["skills", *arguments])


def error(*arguments: str) -> str:
    done = skills(*arguments)
    assert done.exit_code == 2, done.output
    return done.stderr


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def older(tmp_path: Path) -> Skill:
    """The skill with another text and another reference, as an earlier release had it."""
    directory = tmp_path / "older" / "cuda-kernels"
    (directory / "references").mkdir(parents=True)
    (directory / "SKILL.md").write_text("---\nname: cuda-kernels\ndescription: older\n---\n")
    (directory / "references" / "gone.md").write_text("gone\n")
    return read_skill(directory)


@pytest.mark.parametrize("tool", PLACES)
@pytest.mark.parametrize("globally", [False, True])
def test_each_tool_finds_the_skill_in_its_directory(tool: str, globally: bool, project: Path) -> None:
    place = project.parent / "home" / PLACES[tool][1] if globally else project / PLACES[tool][0]
    done = skills("add", "--agent", tool, *["--global"] * globally)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("installed: ")
    files = tree(place / "cuda-kernels")
    del files[RECORD]
    assert files == find_skill("cuda-kernels").files()
    assert read_skill(place / "cuda-kernels").name == "cuda-kernels"
    assert [path.name for path in place.iterdir()] == ["cuda-kernels"], "nothing is left beside it"
    listed = json.loads(skills("list", "--json").output)["installed"]
    assert [(place["tool"], place["scope"], place["state"]) for place in listed] == [
        (tool, "global" if globally else "project", "current")
    ]
    assert "removed" in skills("remove", "--agent", tool, *["--global"] * globally).output
    assert not list(place.iterdir())


def test_adding_again_changes_nothing(project: Path) -> None:
    assert skills("add", "--dest", "mine").exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    assert "unchanged" in skills("add", "--dest", "mine").output
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before


def test_an_older_text_is_replaced_as_a_whole(project: Path, older: Skill) -> None:
    install_skill(older, [project], force=False)
    assert inspect_skill(find_skill("cuda-kernels"), project).state == "outdated"
    assert "updated" in skills("add", "--dest", ".").output
    assert "references/gone.md" not in tree(project / "cuda-kernels")
    assert inspect_skill(find_skill("cuda-kernels"), project).state == "current"


@pytest.mark.parametrize("edit", ["change", "more", "less", "foreign"])
@pytest.mark.parametrize("command", ["add", "remove"])
def test_edits_are_kept_unless_forced(edit: str, command: str, project: Path, older: Skill) -> None:
    place = project / "skills"
    install_skill(older, [place], force=False)
    installed = place / "cuda-kernels"
    if edit == "change":
        (installed / "SKILL.md").write_text("mine\n")
    elif edit == "more":
        (installed / "references" / "mine.md").write_text("mine\n")
    elif edit == "less":
        (installed / "references" / "gone.md").unlink()
    else:
        (installed / RECORD).unlink()
    before = tree(place)
    refused = error(command, "--dest", "skills")
    assert "has edits" in refused and "add --force" in refused
    assert tree(place) == before
    assert skills(command, "--dest", "skills", "--force").exit_code == 0
    state = inspect_skill(find_skill("cuda-kernels"), place).state
    assert state == {"add": "current", "remove": "absent"}[command]


def test_no_place_is_changed_if_one_has_edits(project: Path, older: Skill) -> None:
    install_skill(older, [project / ".cursor/skills"], force=False)
    (project / ".cursor/skills/cuda-kernels/SKILL.md").write_text("mine\n")
    assert skills("add", "--agent", "claude", "--agent", "cursor").exit_code == 2
    assert not (project / ".claude").exists()


def test_a_link_is_not_followed(project: Path) -> None:
    (project / "elsewhere").mkdir()
    (project / "skills").mkdir()
    (project / "skills" / "cuda-kernels").symlink_to(project / "elsewhere")
    for command in ("add", "remove"):
        assert "is not a directory" in error(command, "--dest", "skills", "--force")
    assert not list((project / "elsewhere").iterdir())


def test_a_place_that_cannot_be_written(project: Path) -> None:
    (project / "file").write_text("")
    refused = error("add", "--dest", "file/skills")
    assert "cannot be written: Not a directory" in refused and "--dest" in refused


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ((), "no directory of skills is named", "--agent claude"),
        (("--agent", "claude", "--dest", "a"), "names the directory by itself", "leave out"),
        (("--dest", "a", "--global"), "names the directory by itself", "leave out"),
        (("cuda-kernel", "--agent", "claude"), "there is no skill 'cuda-kernel'", "did you mean cuda-kernels?"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str, hint: str, project: Path) -> None:
    refused = error("add", *arguments)
    assert message in refused and hint in refused
    assert not list(project.iterdir())
