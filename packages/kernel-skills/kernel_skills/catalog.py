"""Skills as directories: reading and checking them, and the built-in one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kernel_format.errors import ConfigError
from kernel_format.front_matter import parse, split
from kernel_judge.api import CUDA_KERNELS

SKILL_FILE = "SKILL.md"
# Agents read SKILL.md as a whole; parts that only some tasks need belong to references.
MOST_TOKENS = 550
# The Agent Skills format: names are words of small letters and digits with dashes between, and name the directory.
_NAME = re.compile(r"(?=.{1,64}$)[a-z0-9]+(-[a-z0-9]+)*")
_MOST_DESCRIPTION = 1024
# Of an upper estimate of tokens, for any tokenizer: a word is split where its case changes, and into parts of five
# letters; each digit, other sign and end of line is a token. It is 1.1 to 1.5 times the count of a public vocabulary.
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\n|\S")
_LETTERS = 5


@dataclass(frozen=True)
class Skill:
    """A directory with a SKILL.md in the Agent Skills format. `tokens` is an upper estimate for SKILL.md."""

    name: str
    description: str
    tokens: int
    directory: Path

    def files(self) -> dict[str, bytes]:
        """Return the content of all files, by relative path."""
        return files_in(self.directory)


def tokens_at_most(text: str) -> int:
    """Return a number of tokens that is not below the count of tokenizers."""
    return sum(
        len(piece.encode()) if not piece.isascii() else -(-len(piece) // _LETTERS) for piece in _PIECE.findall(text)
    )


def files_in(directory: Path) -> dict[str, bytes]:
    """Return the content of all files below a directory, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def find_skill(name: str) -> Skill:
    """Return the built-in skill of a name."""
    if name != CUDA_KERNELS.name:
        raise ConfigError(
            f"there is no skill {name!r}; there is {CUDA_KERNELS.name}",
            where="skills",
            hint="name it, or the directory of another skill",
        )
    return read_skill(CUDA_KERNELS)


def read_skill(directory: Path) -> Skill:
    """Read a skill and check it against the format and the limit of tokens."""
    file = directory / SKILL_FILE
    where = str(file)
    for path in directory.rglob("*"):  # an agent's link could lead to a private file
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError("is not a regular file", where=str(path), hint="copy its text to the skill, or remove it")
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("a skill is a directory with a SKILL.md", where=where, hint="name its directory") from None
    front, _ = split(text)
    form = "begin it with front matter: `---`, `name: my-skill`, `description: its purpose`, `---`"
    if front is None:
        raise ConfigError("has no front matter", where=where, hint=form)
    try:
        values = parse(front)
    except ValueError as error:
        raise ConfigError(f"its front matter {error}", where=where, hint=form) from error
    name, description = values.get("name"), values.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"expected at most 64 small letters, digits and single dashes, got {name!r}", where=f"{where}: name"
        )
    if name != directory.resolve().name:
        raise ConfigError(
            f"{name!r} is not the name of the directory, {directory.resolve().name!r}",
            where=f"{where}: name",
            hint="rename one of them; agents look for the skill by both",
        )
    if not isinstance(description, str) or not 0 < len(description.strip()) <= _MOST_DESCRIPTION:
        raise ConfigError(
            f"expected 1 to {_MOST_DESCRIPTION} characters that say when to use the skill",
            where=f"{where}: description",
        )
    tokens = tokens_at_most(text)
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"has up to {tokens} tokens; expected at most {MOST_TOKENS}",
            where=where,
            hint="move parts that only some tasks need to references/*.md",
        )
    return Skill(name, description.strip(), tokens, directory)
