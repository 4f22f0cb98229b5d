"""The skill's texts: the format, the limit of tokens, numbers from data, and no broken link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from kernel_judge.skills.catalog import MOST_TOKENS, built_in, find_skill, read_skill, tokens_at_most

# Texts with the tokens that the vocabulary of Tekken (mistral-common 1.13, `tekken_240911.json`) has for them.
COUNTED = {
    "Read each input once, write each output once. Fuse; do not launch again.": 18,
    "kernel-builder build DIR --capability 9.0": 13,
    "template <typename T>\n__device__ inline float to_float(T value);\n": 15,
    "| memory bandwidth, data sheet | 3.35 TB/s |": 15,
    "for (int64_t i = threadIdx.x * kWidth; i < columns; i += kThreads * kWidth)": 27,
}


def test_the_skill_is_short_enough() -> None:
    (skill,) = built_in()
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
