"""Flags that a project has for nvcc, as clang spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config.compiler_flags import single
from kernel_format.errors import ConfigError

# Programs that nvcc runs -> clang's option for theirs; it runs no cudafe++ and no nvlink.
_PASSED_ON = {"compiler": "-Xarch_host", "ptxas": "-Xcuda-ptxas", "fatbin": "-Xcuda-fatbinary"}


@cache
def _table() -> Mapping[str, Any]:  # the file takes 13 ms
    table: Mapping[str, Any] = toml_file.read(Path(__file__).with_name("nvcc_options.toml"))["clang"]
    return table


def of_clang(flags: Sequence[str], where: str) -> tuple[str, ...]:
    """Return nvcc's flags as clang's."""
    translated: list[str] = []
    for program, option in single(flags):
        if program:
            translated += [_PASSED_ON[program], *option] if program in _PASSED_ON and any(option) else []
        elif re.fullmatch(_table()["shared"], option[0]) and option[0] not in {"-gencode", "-lineinfo"}:
            translated += option
        else:
            translated += _of_nvcc("=".join(option), where)
    return tuple(translated)


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
