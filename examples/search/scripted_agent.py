#!/usr/bin/env python3
"""An agent that follows a script: it shows how `kernel-builder search` calls an agent, without a model.

It starts in a directory of its own, and reads its instructions from standard input. Its first kernel forgets the
third coordinate. When the search calls it again with the verdict on that, it writes the kernel without the mistake.
"""

import shutil
import sys
from pathlib import Path

ANSWER = Path(__file__).resolve().parent / "answer"
RIGHT = "a * a + b * b + c * c"
MISTAKEN = "a * a + b * b"


def main() -> None:
    prompt = sys.stdin.read()
    shutil.rmtree("kernel")  # the project to start from, with a ReLU
    shutil.copytree(ANSWER, "kernel")
    if "## Your last try" not in prompt:
        source = Path("kernel/cpu/nearest.cpp")
        source.write_text(source.read_text().replace(RIGHT, MISTAKEN))


main()
