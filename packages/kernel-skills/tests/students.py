"""Agents that follow a script: `python students.py KIND`, in a workspace of a search.

Their answers depend on whether the workspace has a skill. The judge of these tests believes the comment in a candidate.

    helped     right in every second try without the skill, in each with it, and twice as fast
    same       right in every second try, with the skill or without it
    harmed     right without the skill, wrong with it
    faster     right always; faster with the skill
    writer     writes a skill; `broken-writer` writes one without front matter, `lazy-writer` none
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SKILL = """---
name: {name}
description: How to be right.
---

Be right.
"""


def main(kind: str) -> None:
    prompt = sys.stdin.read()
    if kind == "lazy-writer":
        sys.exit("no idea")
    if kind.endswith("writer"):
        (file,) = re.findall(r"`(skill/([\w-]+)/SKILL\.md)`", prompt)
        assert Path("traces/1/candidate.py").read_text().startswith("# right")
        assert "it is wrong on purpose" in Path("traces/mistakes.md").read_text()
        Path(file[0]).parent.mkdir(parents=True)
        Path(file[0]).write_text(SKILL.format(name=file[1]) if kind == "writer" else "# Be right\n")
        return
    has_skill = Path("context/skill/SKILL.md").is_file()
    attempt = int(Path.cwd().parts[-3])  # attempts/0001/1/workspace
    every_second = attempt // 2 % 2 == 0
    right = {"helped": has_skill or every_second, "same": every_second, "harmed": not has_skill, "faster": True}
    speed = (2.0 if has_skill and kind in ("helped", "faster") else 1.2) * (1 + attempt % 7 / 100)
    Path("candidate.py").write_text(f"# right {speed:.4f}\n" if right[kind] else f"# wrong\n# {attempt}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
