#!/usr/bin/env python3
"""Make an agent of a command that answers a prompt with text: `answer_agent.py ollama run MODEL`.

The command gets the prompt, the task and the context on its standard input. The last block of Python in its answer
becomes `candidate.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

_LAST = "Answer with the complete `candidate.py` in one block of Python. You cannot run commands."


def prompt() -> str:
    """Return the prompt, and the files that it speaks of."""
    parts = [sys.stdin.read()]
    files = [path for name in ("task", "context") for path in sorted(Path(name).rglob("*")) if path.is_file()]
    for path in [*files, *Path().glob("candidate.py")]:
        parts.append(f"## {path}\n\n```\n{path.read_text(errors='replace')}\n```\n")
    return "\n".join([*parts, _LAST])


def main() -> None:
    answer = subprocess.run(sys.argv[1:], input=prompt(), stdout=subprocess.PIPE, text=True, check=True).stdout
    print(answer)
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", answer, re.DOTALL | re.MULTILINE)
    if not blocks:
        sys.exit("the answer has no block of Python")
    Path("candidate.py").write_text(blocks[-1])


main()
