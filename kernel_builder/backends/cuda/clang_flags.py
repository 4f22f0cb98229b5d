"""Flags that a project has for nvcc, as clang spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config.kernel_sources import options
from kernel_format.errors import ConfigError

_PASSED_ON = r"(?:-X|--)(compiler|ptxas|fatbin|cudafe|nvlink)(?:-options)?"


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = toml_file.read(Path(__file__).with_name("nvcc_options.toml"))["clang"]
    return table


def of_clang(flags: Sequence[str], where: str) -> tuple[str, ...]:
    """Return nvcc's flags as clang's."""
    translated: list[str] = []
    for option in options(flags):
        name, _, value = option[0].partition("=")
        passed = re.fullmatch(_PASSED_ON, name)
        if passed:
            words = (value or (option[1] if option[1:] else "")).split(",")
            translated += _passed_on(passed[1], [word for word in words if word])
        elif re.fullmatch(_table()["shared"], option[0]) and option[0] not in {"-gencode", "-lineinfo"}:
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
    if same := _table()["same"].get(flag):
        return tuple(same)
    if match := re.fullmatch(r"maxrregcount=(\d+)", flag):
        return ("-Xcuda-ptxas", f"--maxrregcount={match[1]}")
    if match := re.fullmatch(r"ftemplate-depth=(\d+)", flag):
        return (f"-ftemplate-depth={match[1]}",)
    without_meaning = "|".join(_table()["without_meaning"])
    if re.fullmatch(without_meaning, flag.partition("=")[0]) or re.fullmatch(without_meaning, flag):
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
