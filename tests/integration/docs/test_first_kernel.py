"""The commands of docs/first-kernel.md work as they are written there, one after the other in one shell."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from tests.support.places import ROOT
from tests.support.programs import run

PAGE = ROOT / "docs" / "first-kernel.md"
_BLOCK = re.compile(r"(?:<!-- write: (\S+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def script() -> str:
    """Return the page as a shell script: its commands, and the files that it tells to write."""
    parts = ["set -eu"]
    for path, language, text in _BLOCK.findall(PAGE.read_text()):
        assert path or language == "sh", f"neither a command nor a file:\n{text}"
        parts.append(f"cat > {path} <<'END OF FILE'\n{text}END OF FILE" if path else text)
    return "\n".join(parts)


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    """pip installs nothing: it and the packages that it would fetch are those of this environment."""
    assert sum(line.startswith("kernel-builder ") for line in script().splitlines()) >= 5
    environment = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    # All tests of the project run once, after the change.
    page = (
        script()
        .replace("-m venv ", "-m venv --without-pip ")
        .replace("pytest -q tests", "pytest -q -m kernels_ci tests", 1)
    )
    printed = run("bash", "-c", page, cwd=tmp_path, env=environment)
    assert "cpu builds: ready" in printed
    assert printed.count(" passed") >= 6
    assert printed.count("Not written yet") == 5, "all that `grep` lists, and none is left afterwards"
    written = [
        (tmp_path / "leaky" / name) for name in ("CARD.md", "torch-ext/leaky/op.py", "torch-ext/leaky/layers.py")
    ]
    assert not any(re.search("Not written yet|torch.where", path.read_text()) for path in written)
    sources = [path for path in (tmp_path / "leaky").rglob("*") if path.suffix in (".py", ".cpp", ".h", ".md")]
    assert not [path for path in sources if "build" not in path.parts and "max(x" in path.read_text()]
    assert "tensor([-0.0100,  2.0000])" in printed
    assert "leaky_relu, backward, bfloat16" in printed
