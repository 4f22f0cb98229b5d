"""Wheels of blocks and its kernels in a new environment with transformers 4.57, whose client loads no such kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.places import ROOT, SOURCES
from tests.support.programs import run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_a_model_is_accelerated(tmp_path: Path) -> None:
    for file in (ROOT / "kernels").glob("*/build.toml"):  # `make packages` has built them
        run(sys.executable, "-m", "kernel_builder", "wheel", file.parent, "--no-load", "--out", tmp_path / "dist")
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    python = tmp_path / "environment" / "bin" / "python"
    release = torch.__version__.partition("+")[0]
    libraries = "transformers==4.57.*", "diffusers==0.39.*", "numpy", "peft", "accelerate", "pytest"
    run(python, "-m", "pip", "install", "--quiet", f"torch=={release}", *libraries)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", tmp_path / "dist", "blocks")
    assert run(python, "-c", SOURCES["llama_by_wheels"], cwd=tmp_path).splitlines()[-1] == "4.57: as before"
    # Gemma 2 and Phi-3 decode otherwise there, and so do models of images; `generate_batch` has other arguments.
    folder, chosen = ROOT / "kernels" / "blocks" / "tests", "not (sizes4 or sizes5 or image_text or continuous)"
    options = "-c/dev/null", f"--rootdir={folder}", f"--confcutdir={folder}", "-pno:cacheprovider", "-k", chosen
    files = folder / "test_transformers.py", folder / "test_blocks_generate.py"
    run(python, "-m", "pytest", "-q", *options, *files, cwd=tmp_path)
