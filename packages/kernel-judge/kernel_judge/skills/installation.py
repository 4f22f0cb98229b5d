"""Installs skills into the directories of coding agents, and removes them.

An installed skill has a record of the installed files. A file that differs from it is the user's own edit, which only
`force` overwrites or removes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernel_format.errors import ConfigError
from kernel_format.files import replaced_directory
from kernel_judge.skills.catalog import Skill, built_in, digests

RECORD = ".kernel-builder.json"
ABSENT, CURRENT, OUTDATED, EDITED = "absent", "current", "outdated", "edited"


class AgentTool(NamedTuple):
    """A coding agent, and its documented directories of skills: in a project, and in the user's home directory."""

    title: str
    project: str
    home: str


AGENT_TOOLS = {
    "claude": AgentTool("Claude Code", ".claude/skills", ".claude/skills"),
    "codex": AgentTool("Codex", ".agents/skills", ".agents/skills"),
    "opencode": AgentTool("OpenCode", ".opencode/skills", ".config/opencode/skills"),
    "cursor": AgentTool("Cursor", ".cursor/skills", ".cursor/skills"),
}


@dataclass(frozen=True)
class Installed:
    """The state of one skill in a directory of skills.

    Attributes:
        path: The directory of the skill.
        state: "absent", "current", "outdated" (the builder has a newer text) or "edited".
        edited: The files that differ from the installed ones, or that are in the way.
    """

    path: Path
    state: str
    edited: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the values as `--json` prints them."""
        return {"path": str(self.path), "state": self.state, "edited": list(self.edited)}


def skill_directory(tool: str, *, globally: bool) -> Path:
    """Return the directory of skills of a tool: in the current directory, or the user's."""
    return Path.home() / AGENT_TOOLS[tool].home if globally else Path(AGENT_TOOLS[tool].project)


def inspect_skill(skill: Skill, directory: Path) -> Installed:
    """Return the state of a skill in a directory of skills."""
    path = directory / skill.name
    if not path.exists() and not path.is_symlink():
        return Installed(path, ABSENT)
    if path.is_symlink() or not path.is_dir():
        return Installed(path, EDITED, (".",))
    present = digests(_contents(path))
    offered = digests(skill.files())
    if {name: present.get(name) for name in offered} == offered and not set(present) - set(offered):
        return Installed(path, CURRENT)
    recorded = _recorded(path)
    edited = sorted(name for name in {*present, *recorded} if present.get(name) != recorded.get(name))
    return Installed(path, EDITED, tuple(edited)) if edited else Installed(path, OUTDATED)


def install_skill(skill: Skill, directories: Sequence[Path], *, force: bool) -> list[Installed]:
    """Install a skill in directories of skills, in each as a whole; return the previous states.

    Raises:
        ConfigError: If a place has edits and `force` is not given, and then nothing is changed; or if a place cannot
            be written, and then that place is as it was.
    """
    states = [inspect_skill(skill, directory) for directory in directories]
    for before in states:
        _check_edits(before, force)
    for before in states:
        if before.state != CURRENT:
            record = json.dumps({"files": digests(skill.files())}, indent=1) + "\n"
            write_files({**skill.files(), RECORD: record.encode()}, before.path)
    return states


def write_files(files: Mapping[str, bytes], path: Path) -> None:
    """Make or replace a directory, which changes as a whole or not at all.

    Raises:
        ConfigError: If it cannot be written.
    """
    try:
        with replaced_directory(path) as staged:
            for name, content in files.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).write_bytes(content)
    except OSError as error:
        raise _unwritable(error.strerror or str(error), path) from error


def uninstall_skill(skill: Skill, directories: Sequence[Path], *, force: bool) -> list[Installed]:
    """Remove a skill from directories of skills; return the previous states.

    Raises:
        ConfigError: If a place has edits and `force` is not given, and then nothing is changed; or if a place cannot
            be written.
    """
    states = [inspect_skill(skill, directory) for directory in directories]
    for before in states:
        _check_edits(before, force)
    for before in states:
        if before.state != ABSENT:
            _remove(before.path)
    return states


def _remove(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.removed")
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)  # agents see the whole skill, or none of it
        shutil.rmtree(doomed)
    except OSError as error:
        raise _unwritable(error.strerror or str(error), path) from error


def installations(project: Path) -> list[tuple[str, str, Skill, Installed]]:
    """Return the skills in a project and of the user: (tool, "project" or "global", skill, state)."""
    places = [(tool, "project", project / names.project) for tool, names in AGENT_TOOLS.items()]
    places += [(tool, "global", Path.home() / names.home) for tool, names in AGENT_TOOLS.items()]
    inspected = [
        (tool, scope, skill, inspect_skill(skill, place)) for tool, scope, place in places for skill in built_in()
    ]
    return [entry for entry in inspected if entry[3].state != ABSENT]


def _check_edits(state: Installed, force: bool) -> None:
    if state.path.is_symlink() or (state.path.exists() and not state.path.is_dir()):
        raise ConfigError("is not a directory", where=str(state.path), hint="move it away, or name another with --dest")
    if state.state == EDITED and not force:
        raise ConfigError(
            f"has edits: {', '.join(state.edited[:5])}{', ...' if state.edited[5:] else ''}",
            where=str(state.path),
            hint="copy the edits that you want to keep, then add --force to replace or remove it",
        )


def _contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != RECORD)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def _recorded(path: Path) -> dict[str, str]:
    """Return the digests of the installed files; empty if another program installed the skill."""
    try:
        files = json.loads((path / RECORD).read_text(encoding="utf-8"))["files"]
        return {str(name): str(value) for name, value in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _unwritable(reason: str, path: Path) -> ConfigError:
    return ConfigError(
        f"cannot be written: {reason}",
        where=str(path),
        hint="change the permissions, or name another directory with --dest; the old files are unchanged",
    )
