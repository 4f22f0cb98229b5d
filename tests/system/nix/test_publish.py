"""From the flake to a Hub, and from there to the public client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import CPU, CUDA
from tests.support.running_hub import running_hub
from tests.system.nix.conftest import Nix

LOAD = """
import torch
from kernels import get_kernel

rmsnorm = get_kernel("kernels-community/rmsnorm", version=1, backend="cpu")
x = torch.randn(3, 64)
expected = torch.nn.functional.rms_norm(x, (64,), torch.ones(64), 1e-6)
assert torch.allclose(rmsnorm.rms_norm(x, torch.ones(64)), expected, rtol=1.3e-6, atol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_build_and_upload(nix: Nix, flake: Path, tmp_path: Path) -> None:
    project = flake / "kernels" / "rmsnorm"
    with running_hub(tmp_path, "--trust", "kernels-community") as hub:
        client = {name: hub.environment[name] for name in ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN")}
        publisher = Nix(nix.root, {**nix.environment, **client})
        done = publisher.run(flake, "run", ".#build-and-upload", "--", "kernels/rmsnorm")
        assert {path.name for path in (project / "build").iterdir()} == {CPU, CUDA}
        for variant in (CPU, CUDA):
            assert f"published  {variant}" in done.stdout
        subprocess.run([sys.executable, "-c", LOAD], check=True, cwd=tmp_path, env=hub.environment)
