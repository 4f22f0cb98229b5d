"""Finds code that assumes warps of 32 lanes, by a search for patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_ROCM = re.compile(r"\b(?:USE_ROCM|ROCM_KERNEL|__HIP_PLATFORM_AMD__|__HIPCC__|__HIP__)\b")

_NEGATED = re.compile(r"!\s*(?:defined)?\s*\(?\s*\w*(?:ROCM|HIP)")

_MASK = r"(?:0[xX][fF]{8}[uU]?[lL]?\b|uint32_t\(-1\)|unsigned\(-1\)|~0[uU]?\b|-1\b)"
_LITERAL_32 = r"[^;{}]*?,\s*32\s*\)"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(rf"\b__(?:shfl|all|any|ballot|match|reduce|activemask)\w*_sync\s*\(\s*{_MASK}"),
        "a mask of 32 lanes; HIP takes masks of 64 bits",
    ),
    (re.compile(rf"\b__syncwarp\s*\(\s*{_MASK}"), "a mask of 32 lanes; HIP takes masks of 64 bits"),
    (re.compile(rf"\b\w*(?:__shfl|SHFL)\w*\s*\({_LITERAL_32}"), "a shuffle among 32 lanes"),
    (re.compile(r"\b__(?:popc|ffs|clz)\s*\(\s*__(?:ballot|activemask)"), "a ballot as a number of 32 bits"),
    (re.compile(r"=\s*16\s*;[^;]*;[^;)]*(?:>>=\s*1|/=\s*2)\s*\)"), "a reduction that begins at 16 lanes"),
    (
        re.compile(
            r"\b(?:threadIdx\s*\.\s*x|tid|lane\w*|thread_?id\w*)\s*"
            r"(?:&\s*(?:31|0[xX]1[fF])|%\s*32|/\s*32|>>\s*5)\b"
        ),
        "lanes counted by 32",
    ),
    (
        re.compile(r"\b\w*(?:[wW]arp|WARP)_?(?:[sS]ize|SIZE|THREADS|[tT]hreads)\w*\s*(?:=\s*|\s)32\b"),
        "a warp of 32 lanes",
    ),
    (
        re.compile(r"\bconstexpr\b[^;=]*=[^;]*\bwarpSize\b|\[\s*warpSize\b|<\s*warpSize\s*[,>]"),
        "warpSize as a constant, which it is not since ROCm 7",
    ),
)


@dataclass(frozen=True)
class _Condition:
    """A condition of the preprocessor that is open: whether its current branch is compiled, and whether one was."""

    is_about_rocm: bool
    compiled: bool
    was_compiled: bool = False

    def next_branch(self) -> _Condition:
        before = self.compiled or self.was_compiled
        return _Condition(True, not before, before)


def assumptions(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, assumption) for a source without comments. Lines count from 1, each once."""
    compiled = _without_other_branches(text)
    by_line: dict[int, str] = {}
    for pattern, assumption in _PATTERNS:
        for match in pattern.finditer(compiled):
            by_line.setdefault(compiled.count("\n", 0, match.start()) + 1, assumption)
    yield from sorted(by_line.items())


def _without_other_branches(text: str) -> str:
    """Return a source with empty lines in place of those that conditions leave out for ROCm."""
    kept: list[str] = []
    conditions: list[_Condition] = []
    for line in text.split("\n"):
        if directive := _DIRECTIVE.match(line):
            word, test = directive.groups()
            if word.startswith("if"):
                about = _ROCM.search(test) is not None
                conditions.append(_Condition(about, not about or not (word == "ifndef" or _NEGATED.search(test))))
            elif word == "endif" and conditions:
                conditions.pop()
            elif conditions and conditions[-1].is_about_rocm:
                conditions[-1] = conditions[-1].next_branch()
        kept.append(line if all(condition.compiled for condition in conditions) else "")
    return "\n".join(kept)
