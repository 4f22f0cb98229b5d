"""The lines of the repository's README print the report, on a machine without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_lines_of_the_readme():
    section = (ROOT / "README.md").read_text().partition("### Models\n")[2].partition("\n## ")[0]
    (python,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    page = (ROOT / "docs/local-development.md").read_text()  # to which the section leads
    (export,) = re.findall(r"^    (export LOCAL_KERNELS=.*)$", page, re.MULTILINE)
    script = f'{export}\nexec "$0" -c "$1"'
    command = ["bash", "-euc", script, sys.executable, python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ modules replaced, \d+ left as before; kernels for (cpu|cuda)\nreplaced:\n", done.stdout)
    assert "2 x LTXVideoTransformerBlock" in done.stdout
