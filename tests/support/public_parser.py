"""The public parser of `build.toml` on files of edition 6: that of client 0.17.2 reads edition 5.

The package index has no client with a parser of edition 6. The editions differ in the spelling of a few keys alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomli
from kernels._rust import Build


def in_edition_5(text: str) -> str:
    """Return a file of edition 6 in edition 5. Rust and several upstream repositories have no spelling there."""
    text = re.sub(r"\blanguage(\"?\s*)= (['\"]+)cpp-", r"backend\1= \2", text.replace("edition = 6", "edition = 5"))
    return re.sub(r'\bupstream = \[("[^"]*")\]', r"upstream = \1", text)


def read(text: str, directory: Path) -> Build:
    """Read a file of edition 6, written to a directory in edition 5; ValueError if the public parser rejects it."""
    document = tomli.loads(text)
    kernels = document.get("kernel", {}).values()
    if document["general"]["edition"] != 6 or any("backend" in kernel for kernel in kernels):
        raise ValueError("not edition 6")
    (directory / "build.toml").write_bytes(in_edition_5(text).encode())
    return Build.open(directory)
