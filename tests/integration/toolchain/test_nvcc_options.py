"""`backends/nvcc_options.toml` knows every option of the pinned nvcc."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_builder import toml_file
from kernel_builder.backends.cuda import CUDA, backend, toolkits
from kernel_builder.toolchain import Toolchains


def test_every_option_of_nvcc_is_allowed_or_refused_with_a_reason() -> None:
    nvcc = toolkits.toolkit(Toolchains(), max(filter(None, CUDA.releases()))).root / "bin" / "nvcc"
    words = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"^--([\w+-]+).*?\((?:-([\w+-]+))?\)", words, re.M)
    names = {name for pair in options for name in pair if name}
    assert len(names) > 150
    _, refused = backend.nvcc_options()
    data = toml_file.read(Path(backend.__file__).with_name("nvcc_options.toml"))
    known = {name for kind in data["allowed"].values() for name in kind} | refused.keys()
    assert names - known == set()
    assert set(data["allowed"]["plain"]) & refused.keys() == set()
