"""The lines of the repository's README accelerate a model."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CALL = """
import torch
inputs = {"hidden_states": torch.randn(1, 12, 128), "encoder_hidden_states": torch.randn(1, 5, 4096)}
inputs |= {"timestep": torch.tensor([500.0]), "encoder_attention_mask": torch.ones(1, 5)}
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = {name: value.to(device) for name, value in inputs.items()}
model.to(device)(**inputs, num_frames=1, height=3, width=4)
print(report)
"""


def test_lines_of_the_readme():
    section = (ROOT / "README.md").read_text().partition("### Models\n")[2].partition("\n## ")[0]
    (python,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    page = (ROOT / "docs/local-development.md").read_text()  # to which the section leads
    (export,) = re.findall(r"^    (export LOCAL_KERNELS=.*)$", page, re.MULTILINE)
    command = ["bash", "-euc", f'{export}\nexec "$0" -c "$1"', sys.executable, python + CALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ modules replaced, 0 left as before; kernels for (cpu|cuda)\nreplaced:\n", done.stdout)
    assert "2 x LTXVideoTransformerBlock    residual sum with gate" in done.stdout
