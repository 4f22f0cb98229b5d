"""Gives each project beside the kit its own copy of the files it uses, since a published project stands alone.

Usage: python kernels/kit/copy.py [--check]

A project uses the files that its build.toml lists as `kit/...`, in its Python package those whose names start with an
underscore, and in its benchmarks workload.py. With --check nothing is written; the copies that are missing, differ, or
belong to no listed file are named, and then the exit status is 1.
"""

import re
import sys
from pathlib import Path

KIT = Path(__file__).resolve().parent


def outdated(project: Path) -> "dict[Path, bytes | None]":
    """What each copy that is not as it must be should hold; None: it should not be there."""
    listed = set(re.findall(r'"kit/([^"]+)"', (project / "build.toml").read_text()))
    wanted = {project / "kit" / name: (KIT / name).read_bytes() for name in listed}
    package = project / "torch-ext" / project.name
    if package.is_dir():
        wanted |= {package / path.name: path.read_bytes() for path in KIT.glob("_[!_]*.py")}
    benchmarks = project / "benchmarks"
    if benchmarks.is_dir():
        wanted[benchmarks / "workload.py"] = (KIT / "workload.py").read_bytes()
    copies = [*(project / "kit").glob("*"), *(path for path in wanted if path.exists())]
    present = {path: path.read_bytes() for path in copies}
    return {path: wanted.get(path) for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path)}


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    found = False
    for build in sorted(KIT.parent.glob("*/build.toml")):
        for path, content in sorted(outdated(build.parent).items()):
            found = True
            print(path.relative_to(KIT.parent))
            if check:
                continue
            if content is None:
                path.unlink()
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
