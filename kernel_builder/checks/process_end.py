"""Check that the binary does not end its user's process, by `exit`, `abort` and the like.

A kernel that ends the process takes a server, a notebook or a training run with it, where an exception would have been
caught. A finding is a warning, because most such calls only follow another error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernel_builder.checks import registrations
from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "process-end"
_ENDING = frozenset({"exit", "abort", "_exit", "_Exit", "quick_exit"})
_CALL = re.compile(r"(?<![\w.>])(exit|abort|_exit|_Exit|quick_exit)\s*\(")
_HINT = "report the error as an exception: TORCH_CHECK, STD_TORCH_CHECK on the stable ABI, or throw"


def check_process_end(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        needed = {symbol.name for symbol in binary.undefined} & _ENDING
        unexplained = set(needed)
        texts = registrations.sources(package.project, package.variant) if package.project and package.variant else {}
        for path, text in texts.items() if needed else ():
            calls = [match for match in _CALL.finditer(text) if match[1] in needed]
            if calls:
                lines = sorted({text.count("\n", 0, call.start()) + 1 for call in calls})
                names = sorted({call[1] for call in calls})
                unexplained -= set(names)
                yield _finding(path, f"line {', '.join(map(str, lines))}: ", names)
        # The C++ runtime's own code calls abort.
        if others := sorted(unexplained - {"abort"}):
            yield _finding(binary.name, "", others)


def _finding(path: str, line: str, names: list[str]) -> Finding:
    message = f"{line}calls {' and '.join(names)}, which ends the process of the kernel's user"
    return Finding(NAME, path, message, _HINT, "warning")
