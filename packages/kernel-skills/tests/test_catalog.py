"""The built-in skill: format, tokens and links; its installation, whole or not at all, never over a user's edits."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from kernel_skills.catalog import MOST_TOKENS, files_in, find_skill, read_skill, tokens_at_most
from kernel_skills.installation import copy_skill
from tests.support.cli import expect, invoke
from tests.support.files import write_files

add = partial(invoke, "skills", "add")
# Texts with the tokens that the vocabulary of Tekken (mistral-common 1.13, `tekken_240911.json`) has for them.
COUNTED = {
    "Read each input once, write each output once. Fuse; do not launch again.": 18,
    "kernel-builder build DIR --capability 9.0": 13,
    "template <typename T>\n__device__ inline float to_float(T value);\n": 15,
    "| memory bandwidth, data sheet | 3.35 TB/s |": 15,
    "for (int64_t i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth)": 27,
}


def test_the_skill_is_short_enough() -> None:
    skill = find_skill("cuda-kernels")
    assert skill.name == "cuda-kernels"
    assert skill.tokens <= MOST_TOKENS == 550


@pytest.mark.parametrize("text", COUNTED)
def test_the_count_of_tokens_is_not_below_that_of_a_tokenizer(text: str) -> None:
    assert COUNTED[text] <= tokens_at_most(text) <= 2 * COUNTED[text]


def test_signs_of_other_scripts_count_by_their_bytes() -> None:
    assert tokens_at_most("λ漢") == 5


def test_the_skill_names_every_reference_and_no_other() -> None:
    skill = find_skill("cuda-kernels")
    text = (skill.directory / "SKILL.md").read_text()
    named = set(re.findall(r"`([\w-]+\.md)`", text)) - {"gpu-NAME.md"}
    (listed,) = re.findall(r"limits of (.*)\n", text)
    named |= {f"gpu-{gpu}.md" for gpu in listed.split(", ")}
    assert named == {path.name for path in (skill.directory / "references").iterdir()}


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (None, "SKILL.md", "a directory with a SKILL.md"),
        ("# Skill\n", "SKILL.md", "has no front matter"),
        ("---\n- a\n---\n", "SKILL.md", "is not a table"),
        ("---\nname: My_Skill\ndescription: a\n---\n", "SKILL.md: name", "small letters"),
        ("---\nname: other\ndescription: a\n---\n", "SKILL.md: name", "is not the name of the directory"),
        ("---\nname: mine\n---\n", "SKILL.md: description", "1 to 1024 characters"),
        ("---\nname: mine\ndescription: a\n---\n" + "word " * 600, "SKILL.md", "expected at most 550"),
    ],
)
def test_what_is_not_a_skill_is_refused(tmp_path: Path, text: str | None, where: str, message: str) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    if text is not None:
        (directory / "SKILL.md").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_skill(directory)
    assert str(refused.value.where).endswith(where)


@pytest.mark.attack
def test_a_skill_has_no_links(tmp_path: Path) -> None:
    """An agent that writes a skill could put a private file of the user into it."""
    write_files(tmp_path / "mine", {"SKILL.md": "---\nname: mine\ndescription: a\n---\n"})
    (tmp_path / "mine" / "private.md").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"private\.md: is not a regular file"):
        read_skill(tmp_path / "mine")


def test_scripts_stay_executable(tmp_path: Path) -> None:
    write_files(tmp_path / "mine", {"SKILL.md": "---\nname: mine\ndescription: a\n---\n", "run.sh": "#!/bin/sh\n"})
    (tmp_path / "mine" / "run.sh").chmod(0o755)
    copy_skill(read_skill(tmp_path / "mine"), tmp_path / "copy")
    assert (tmp_path / "copy" / "run.sh").stat().st_mode & 0o111 == 0o111


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


@pytest.mark.parametrize("tool", PLACES)
@pytest.mark.parametrize("globally", [False, True])
def test_each_tool_finds_the_skill_in_its_directory(tool: str, globally: bool, project: Path) -> None:
    place = project.parent / "home" / PLACES[tool][1] if globally else project / PLACES[tool][0]
    done = expect(0, "", "skills", "add", "--agent", tool, *["--global"] * globally)
    assert done.output.startswith("installed: ")
    assert files_in(place / "cuda-kernels") == find_skill("cuda-kernels").files()
    assert [path.name for path in place.iterdir()] == ["cuda-kernels"], "no other file beside it"


def test_adding_again_changes_nothing(project: Path) -> None:
    assert add("--dest", "mine").exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    assert "unchanged" in add("--dest", "mine").output
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before


@pytest.mark.parametrize("edit", ["change", "more", "less"])
def test_edits_are_kept_unless_forced(edit: str, project: Path) -> None:
    add("--dest", ".cursor/skills")
    installed = project / ".cursor" / "skills" / "cuda-kernels"
    if edit == "change":
        (installed / "SKILL.md").write_text("mine\n")
    elif edit == "more":
        (installed / "references" / "mine.md").write_text("mine\n")
    else:
        (installed / "references" / "torch.md").unlink()
    before = files_in(installed)
    assert "--force" in expect(2, "differs from", "skills", "add", "--agent", "claude", "--agent", "cursor").stderr
    assert files_in(installed) == before
    assert not (project / ".claude").exists(), "no place is changed if one has edits"
    assert "replaced" in add("--agent", "cursor", "--force").output
    assert files_in(installed) == find_skill("cuda-kernels").files()


@pytest.mark.attack
@pytest.mark.parametrize("link", ["skills/cuda-kernels", "skills", ".cursor"])
def test_a_link_is_not_followed(link: str, project: Path) -> None:
    """A cloned project may have one, also above the skill's directory, that leads out of it."""
    (project / link).parent.mkdir(exist_ok=True)
    (project / "elsewhere/skills/cuda-kernels").mkdir(parents=True)
    (project / link).symlink_to(project / "elsewhere")
    to = ("--agent", "cursor") if link == ".cursor" else ("--dest", "skills")
    expect(2, f"{link}: is not a directory", "skills", "add", *to, "--force")
    assert not [path for path in (project / "elsewhere").rglob("*") if path.is_file()]


def test_a_place_that_cannot_be_written(project: Path) -> None:
    (project / "file").write_text("")
    expect(1, "file/skills: Not a directory\n  hint: free some space", "skills", "add", "--dest", "file/skills")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--agent claude"),
        (("--agent", "claude", "--dest", "a"), "expected either --agent or --dest"),
        (("--dest", "a", "--global"), "--global only with --agent"),
        (("cuda-kernel", "--agent", "claude"), "there is no skill 'cuda-kernel'; there is cuda-kernels"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str, project: Path) -> None:
    expect(2, message, "skills", "add", *arguments)
    assert not list(project.iterdir())
