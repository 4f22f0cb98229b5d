"""Installs skills into the directories of coding agents."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernel_format.errors import ConfigError
from kernel_format.files import replaced_directory, write_files
from kernel_skills.catalog import Skill, files_in


class SkillDirectories(NamedTuple):
    """The documented directories of a coding agent's skills: in a project, and in the user's home directory."""

    project: str
    home: str


AGENT_TOOLS = {
    "claude": SkillDirectories(".claude/skills", ".claude/skills"),
    "codex": SkillDirectories(".agents/skills", ".agents/skills"),
    "opencode": SkillDirectories(".opencode/skills", ".config/opencode/skills"),
    "cursor": SkillDirectories(".cursor/skills", ".cursor/skills"),
}


def skill_directory(tool: str, *, globally: bool) -> Path:
    """Return the directory of skills of a tool: in the current directory, or the user's."""
    return Path.home() / AGENT_TOOLS[tool].home if globally else Path(AGENT_TOOLS[tool].project)


def install_skill(skill: Skill, directories: Sequence[Path], *, force: bool) -> list[tuple[str, Path]]:
    """Install a skill in directories of skills; return "installed", "unchanged" or "replaced" for each place."""
    results = []
    for path in [directory / skill.name for directory in directories]:
        differing = _differing_files(skill, path)
        if differing and not force:
            raise ConfigError(
                f"differs from this release's skill: {', '.join(differing[:5])}{', ...' if differing[5:] else ''}",
                where=str(path),
                hint="copy the edits that you want to keep, then add --force to replace it",
            )
        results.append(("replaced" if differing else "unchanged" if path.exists() else "installed", path))
    for result, path in results:
        if result != "unchanged":
            copy_skill(skill, path)
    return results


def _differing_files(skill: Skill, path: Path) -> list[str]:
    # Relative directories are those of a project, whose links may lead out of it.
    for part in (path, *(() if path.is_absolute() else path.parents)):
        if part.is_symlink() or (part == path and path.exists() and not path.is_dir()):
            raise ConfigError("is not a directory", where=str(part), hint="move it away, or name another with --dest")
    if not path.exists():
        return []
    present, offered = files_in(path), skill.files()
    return sorted(name for name in {*present, *offered} if present.get(name) != offered.get(name))


def copy_skill(skill: Skill, path: Path) -> None:
    """Create or replace the directory of a skill, as a whole or not at all."""
    with replaced_directory(path) as staged:
        write_files(staged, skill.files())
        for name in skill.files():  # scripts stay executable
            shutil.copymode(skill.directory / name, staged / name)
