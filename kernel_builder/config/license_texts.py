"""Recognizes the license of a text, such as a `LICENSE` file."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_builder.config.project_files import work_tree

# SPDX name -> a pattern of its text, in small letters.
_LICENSES = (
    ("apache-2.0", r"apache"),
    ("mit", r"\bmit\b|permission is hereby granted, free of charge"),
    ("bsd-3-clause", r"bsd[- ]3|3-clause|neither the name of"),
    ("bsd-2-clause", r"bsd[- ]2|2-clause"),
    ("gpl-3.0", r"gpl-?v?3|gnu general public license\s+version 3"),
    ("mpl-2.0", r"mozilla public"),
)
_BEGINNING = 3000  # characters of a license file that are searched


def spdx_name(text: str) -> str | None:
    """Return the SPDX name of the license in a text, or of a license's name."""
    return next((name for name, pattern in _LICENSES if re.search(pattern, text.lower())), None)


def suggested(root: Path) -> tuple[str, Path] | None:
    """Return the license of a project by the file with its text, in its directory or further up in its repository."""
    top = work_tree(root)
    for directory in (root, *root.parents):
        if not directory.is_relative_to(top):
            break
        for path in sorted(directory.glob("LICEN[SC]E*")):
            if path.is_file() and (name := spdx_name(path.read_text(errors="replace")[:_BEGINNING])):
                return name, path
    return None
