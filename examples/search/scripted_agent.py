#!/usr/bin/env python3
"""An agent that follows a script: it shows how `kernel-builder search` calls an agent, without a model.

It starts in a directory of its own, and reads what to do on its standard input. Its first kernel forgets that hard
swish is 0 below -3. When the search calls it again with the verdict on that, it writes the kernel without the mistake.
"""

import shutil
import sys
from pathlib import Path

ANSWER = Path(__file__).resolve().parent / "answer"
RIGHT = "std::min(std::max(x[i] + 3.0f, 0.0f), 6.0f)"
MISTAKEN = "std::min(x[i] + 3.0f, 6.0f)"


def main() -> None:
    prompt = sys.stdin.read()
    shutil.rmtree("kernel")  # the project to start from, with a ReLU
    shutil.copytree(ANSWER, "kernel")
    if "## Your last try" not in prompt:
        source = Path("kernel/cpu/hard_swish.cpp")
        source.write_text(source.read_text().replace(RIGHT, MISTAKEN))


main()
