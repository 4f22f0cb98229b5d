"""The last command of a compile step: moves the object into the cache if its compiler has read nothing else.

    files_read.py OUTPUT DIGEST

It runs in the step's directory, outside of a sandbox, and starts fast: without site-packages. Names of files are bytes,
in whatever encoding.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator

# The directory that a compiler can write to. Files are moved out of it before they are read.
INSIDE = "inside"
# Lists of the files that the compiler and the assembler have read, as rules of make.
HEADERS_READ, ASSEMBLED = "headers-read", "assembled"
# clang lists the headers of host code there, and the headers for all architectures here, one name per line:
# `backends.host_code.HEADERS_PRINTED`.
PRINTED = "headers-printed"
# Regular expressions for the files that a step may read, one per line, and the names of other files that it has read.
READABLE, FOREIGN = "readable", "foreign"


def listed(directory: str) -> list[bytes]:
    """Return the files that a step has read, without `x/../`. Relative names, from inside, begin with `./`."""
    names: list[bytes] = []
    for name in (HEADERS_READ, ASSEMBLED, PRINTED):
        if name == HEADERS_READ or os.path.lexists(f"{directory}/{name}"):
            with open(f"{directory}/{name}", "rb") as file:
                content = file.read()
            names += content.splitlines() if name == PRINTED else _in_rules(content)
    return list(dict.fromkeys(map(_plain, filter(None, names))))


def _in_rules(rules: bytes) -> Iterator[bytes]:
    """Yield the files on which rules of make say that `out.o` depends."""
    for word in re.findall(rb"(?:\\ |[^ \t\n])+", re.sub(rb"(?m)^out[.]o ?:(?= |$)|\\$", b"", rules)):
        yield word.replace(b"\\ ", b" ").replace(b"\\#", b"#").replace(b"$$", b"$")


def _plain(name: bytes) -> bytes:
    name = os.path.normpath(name)
    return b"/" + name.lstrip(b"/") if name.startswith(b"/") else b"./" + name


def foreign(names: Iterable[bytes], readable: bytes) -> list[bytes]:
    """Return the names that match none of the expressions."""
    known = re.compile(b"|".join(b"(?:%s)" % expression for expression in readable.split(b"\n")))
    return [name for name in names if not known.fullmatch(name)]


def main() -> None:
    """Check the lists of a step, and move its object."""
    output, digest_path = sys.argv[1:]
    for name in ("out.o", HEADERS_READ, ASSEMBLED, PRINTED):
        if os.path.lexists(f"{INSIDE}/{name}"):
            os.replace(f"{INSIDE}/{name}", name)
            if not stat.S_ISREG(os.lstat(name).st_mode):  # a link or a pipe leads anywhere
                sys.exit(f"{name} is not a file")
    names = listed(".")
    if not names:
        sys.exit("the compiler did not list the files that it has read")
    with open(READABLE, "rb") as file:
        refused = foreign(names, file.read())
    if refused:
        with open(FOREIGN, "wb") as file:
            file.writelines(name + b"\n" for name in refused)
        sys.exit(1)
    with open("out.o", "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    with open("digest", "w") as file:
        file.write(digest)
    os.replace("digest", digest_path)
    os.replace("out.o", output)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
