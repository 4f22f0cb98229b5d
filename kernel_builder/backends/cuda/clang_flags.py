"""Flags that a project has for nvcc, as clang spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kernel_builder.config.kernel_sources import options
from kernel_format.errors import ConfigError

# These are compiled when a build has flags for clang: together they take 2 ms.
# Flags of g++, which clang knows too: definitions, warnings, optimizations, the standard.
_SHARED = r"-[DUOfWgmlw].*|--?std=.*|-pthread|-pedantic.*|-ansi|-pipe"

# clang has these as its default, or has nothing to set: they concern nvcc's parser, its messages and its speed.
_WITHOUT_MEANING = (
    r"expt-relaxed-constexpr|expt-extended-lambda|extended-lambda|extra-device-vectorization|restrict|Wno-\w.*|"
    r"ewp|dopt|brief-diagnostics|time-trace|disable-warnings|threads|t|split-compile(-extended)?|Ofast-compile|"
    r"(diag|display)[-_].*|ftemplate-backtrace-limit|compress-mode|device-entity-has-hidden-visibility|"
    r"static-global-template-stub|no-compress|allow-unsupported-compiler|forward-unknown-.*|no-?err-no|verbose2?|v2|"
    r"prec-(div|sqrt)=true|ftz=false|fmad=true|default-stream=legacy|source-in-ptx|extra-\w.*"
)

_FAST_DIVISION = ("-mllvm", "-nvptx-prec-divf32=0")
_FAST_ROOT = ("-mllvm", "-nvptx-prec-sqrtf32=0")
_FLUSH = ("-fgpu-flush-denormals-to-zero",)
_SAME: Mapping[str, tuple[str, ...]] = {
    "use_fast_math": (*_FLUSH, *_FAST_DIVISION, *_FAST_ROOT, "-fgpu-approx-transcendentals"),
    "ftz=true": _FLUSH,
    "prec-div=false": _FAST_DIVISION,
    "prec-sqrt=false": _FAST_ROOT,
    "fmad=false": ("-ffp-contract=off",),
    "default-stream=per-thread": ("-fgpu-default-stream=per-thread",),
    "lineinfo": ("-gline-tables-only",),
    "generate-line-info": ("-gline-tables-only",),
    "resource-usage": ("-Xcuda-ptxas", "-v"),
    "res-usage": ("-Xcuda-ptxas", "-v"),
}
_PASSED_ON = r"(?:-X|--)(compiler|ptxas|fatbin|cudafe|nvlink)(?:-options)?"


def of_clang(flags: Sequence[str], where: str) -> tuple[str, ...]:
    """Return nvcc's flags as clang's."""
    translated: list[str] = []
    for option in options(flags):
        name, _, value = option[0].partition("=")
        passed = re.fullmatch(_PASSED_ON, name)
        if passed:
            words = (value or (option[1] if option[1:] else "")).split(",")
            translated += _passed_on(passed[1], [word for word in words if word])
        elif re.fullmatch(_SHARED, option[0]) and option[0] not in {"-gencode", "-lineinfo"}:
            translated += option
        else:
            translated += _of_nvcc("=".join(option), where)
    return tuple(translated)


def _passed_on(program: str, words: Sequence[str]) -> Iterator[str]:
    """Yield options for a program that nvcc runs, as clang passes them on; it runs no cudafe++ and no nvlink."""
    option = {"compiler": "-Xarch_host", "ptxas": "-Xcuda-ptxas", "fatbin": "-Xcuda-fatbinary"}.get(program)
    for word in words if option else ():
        yield from (option or "", word)


def _of_nvcc(written: str, where: str) -> tuple[str, ...]:
    flag = written.lstrip("-")
    if flag in _SAME:
        return _SAME[flag]
    if match := re.fullmatch(r"maxrregcount=(\d+)", flag):
        return ("-Xcuda-ptxas", f"--maxrregcount={match[1]}")
    if match := re.fullmatch(r"ftemplate-depth=(\d+)", flag):
        return (f"-ftemplate-depth={match[1]}",)
    if re.fullmatch(_WITHOUT_MEANING, flag.partition("=")[0]) or re.fullmatch(_WITHOUT_MEANING, flag):
        return ()
    architecture = re.match(r"-{1,2}(gencode|generate-code|arch|code|gpu-(architecture|code))\b", written)
    raise ConfigError(
        f"clang, which compiles the variants of CUDA 12, has nothing like nvcc's {written}",
        where=where,
        hint='leave it out, and list the capabilities: cuda-capabilities = ["9.0a"]'
        if architecture
        else 'remove the flag, or leave CUDA 12 out by [general.cuda] minver = "13.0", or compile with an nvcc of '
        "CUDA 12: `--cuda-home DIR`",
    )
