"""A project with all kinds of files, for tests of the reader of build.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError

MINIMAL = """\
[general]
name = "my-relu"
version = 1
edition = 5
license = "apache-2.0"
backends = ["cpu"]

[torch]
src = ["torch-ext/binding.cpp"]

[kernel.relu]
backend = "cpu"
depends = ["torch"]
src = ["relu.cpp"]
"""
WHOLE = """\
[general]
name = "my-relu"
version = 3
edition = 5
license = "mit"
backends = ["cuda", "cpu", "cuda"]
upstream = "https://github.com/o/up"
source = "git@github.com:o/src.git"
python-depends = ["einops"]
kernel-depends = [{ repo-id = "o/base", version = 2 }]

[general.hub]
repo-id = "o/my-relu"
branch = "v3"

[general.cuda]
minver = "12.8"
maxver = "13.2"
python-depends = ["nvidia-cutlass-dsl"]
kernel-depends = [{ repo-id = "o/more", revision = "main" }]

[torch]
src = ["torch-ext/binding.cpp"]
include = ["./inc", "."]
pyext = ["py", "json"]
cxx-flags = ["-Wall"]
minver = "2.10"
maxver = "2.15"
stable-abi = "2.10"

[kernel.relu]
backend = "cuda"
depends = ["torch", "cutlass_4_0"]
src = ["relu.cu", "inc/relu.h"]
include = ["inc"]
cxx-flags = ["-g"]
cuda-capabilities = ["9.0a", "12.0+PTX"]
cuda-flags = ["-lineinfo"]
cuda-minver = "12.8"

[kernel.relu-rocm]
backend = "rocm"
depends = []
src = ["relu.cu"]
rocm-archs = ["gfx942"]
hip-flags = ["-O2"]
"""


def write_project(directory: Path) -> Path:
    """Make a project with all files that the texts above name, at a path with a space and an umlaut."""
    home = directory / "my ünusual project"
    for name in (
        "relu.cpp",
        "relu.cu",
        "inc/relu.h",
        "torch-ext/binding.cpp",
        "torch-ext/my_relu/__init__.py",
        "torch-ext/my_relu/layers/__init__.py",
        "torch-ext/my_relu/data/table.json",
        "torch-ext/my_relu/notes.txt",
        "torch-ext/my_relu/__pycache__/__init__.cpython-311.pyc",
        "torch-ext/my_relu/__pycache__/stale.py",
        "torch-ext/my_relu/.hidden.py",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "build.toml").write_text(MINIMAL)
    return home


def mistake(home: Path, text: str | None = None) -> ConfigError:
    """Return the error with which a project is refused, after its build.toml has got a text, if one is given."""
    if text is not None:
        (home / "build.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_project(home)
    error = caught.value
    assert error.hint and error.where
    assert error.where.startswith(str(home))
    return error
