"""The quickstart of a project with Triton kernels, from `init` to a Hub and a wheel, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.build_command.test_wheel import fresh_environment, pip
from tests.support.builder_process import run_builder
from tests.support.git import git
from tests.support.places import CUDA
from tests.support.running_hub import RunningHub
from tests.support.torch_process import run_with_torch
from tests.support.triton_store import require_triton

REPO, NOARCH = "kernels-community/my-relu", "torch-cuda"
RESOLVE = f"""
import torch
torch.version.cuda = "13.0"  # this Torch may be built for the CPU alone
from huggingface_hub import HfApi
from kernels.variants import get_variants, resolve_variants
found = get_variants(HfApi(), repo_id="{REPO}", revision="v1")
print(*(variant.variant_str for variant in resolve_variants(found, "cuda")[0]))
"""


# Triton and the compilers run twice, for the build and its verification: 30 s of processor time.
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_quickstart_of_a_triton_project(hub: RunningHub, new_cache: Callable[[str], Path], tmp_path: Path) -> None:
    require_triton()
    environment = {**hub.environment, "KERNEL_BUILDER_CACHE": str(new_cache("cache"))}
    project = tmp_path / "my-relu"

    def builder(*arguments: object) -> Any:
        return json.loads(run_builder(environment, *arguments, "--json", check=True).stdout)

    run_builder(environment, "init", project, "--name", REPO, "--language", "triton", check=True)
    declared = re.sub("dtypes = .*", 'dtypes = ["float32"]', (project / "aot.toml").read_text())
    (project / "aot.toml").write_text(f'capabilities = ["9.0"]\n{declared}')
    for command in (["init"], ["add", "."], ["commit", "-m", "First"]):
        git(project, *command)

    built = builder("build", project, "--variant", CUDA, "--variant", NOARCH)
    assert {package["variant"] for package in built["packages"]} == {CUDA, NOARCH}
    assert not [each for each in builder("check-builds", project)["packages"] if not each["ok"]]
    example = run_with_torch(
        (project / "example.py").read_text().replace("__file__", repr(str(project / "example.py")))
    )
    assert example.returncode == 1
    assert example.stderr == f"this kernel is for cuda, and Torch {torch.__version__} finds no such device here\n"

    wheels = {wheel["variants"][0]: wheel["path"] for wheel in builder("wheel", project)["wheels"]}
    for number, (variant, wheel) in enumerate(sorted(wheels.items())):
        python, _ = fresh_environment(tmp_path / f"environment-{number}")
        assert pip(python, wheel).returncode == 0
        imported = subprocess.run([python, "-c", "import my_relu"], capture_output=True, text=True, check=False)
        assert (
            f"ImportError: my_relu has no variant for this environment.\n  this wheel has: {variant}" in imported.stderr
        )

    assert set(builder("upload", project)["variants"]) == {CUDA, NOARCH}
    verified = builder("verify", f"{REPO}@v1", "--source", project)
    assert {each["variant"]: each["rebuilt"] for each in verified["variants"]} == {CUDA: "equal", NOARCH: "equal"}
    assert run_with_torch(RESOLVE, **hub.environment).stdout.split() == [CUDA, NOARCH]
    loaded = run_with_torch(f"from kernels import get_kernel; get_kernel('{REPO}', version=1)", **hub.environment)
    assert f"{CUDA}: backend (cu130) does not match selected backend (cpu)" in loaded.stderr
