"""`doctor --for`: whether a published kernel loads here, and the change that makes it load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from huggingface_hub import CommitOperationAdd
from packaging.version import Version

from tests.support.places import CPU
from tests.support.running_hub import RunningHub

from .conftest import BUILDER

KERNEL = "org/kernel"
OTHER = Version(torch.__version__).minor - 1
OLD = f"torch2{OTHER}-cxx11-cpu-x86_64-linux"


def publish(hub: RunningHub, branches: Mapping[str, Mapping[str, object]]) -> None:
    """Publish variants, as branch -> variant -> metadata."""
    hub.api().create_repo(KERNEL, repo_type="kernel", exist_ok=True)
    for branch, variants in branches.items():
        hub.api().create_branch(KERNEL, repo_type="kernel", branch=branch)
        files = {f"build/{variant}/metadata.json": json.dumps(about) for variant, about in variants.items()}
        operations = [CommitOperationAdd(path, text.encode()) for path, text in files.items()]
        hub.api().create_commit(KERNEL, operations, repo_type="kernel", revision=branch, commit_message="Publish")


def doctor(hub: RunningHub, name: str) -> tuple[int, dict[str, Any]]:
    command = [BUILDER, "doctor", "--for", name, "--json"]
    done = subprocess.run(command, env=hub.environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("branches", "options"),
    [
        ({"v1": {CPU: {}}}, None),
        ({"v1": {OLD: {}}}, {(f"Torch 2.{OTHER}",): OLD}),
        (
            {"v1": {OLD: {}}, "v2": {CPU: {}}},
            {(f"Torch 2.{OTHER}",): OLD, ("get_kernel('org/kernel', version=2)",): CPU},
        ),
        ({"v1": {CPU: {"kernels-minver": "99.1.0"}}}, {("kernels 99.1.0 or later",): CPU}),
        ({"v1": {CPU.replace("x86_64", "aarch64"): {}}}, {}),
    ],
)
def test_a_single_change_is_named(
    hub: RunningHub, branches: Mapping[str, Mapping[str, object]], options: dict[tuple[str, ...], str] | None
) -> None:
    if "+cpu" not in torch.__version__:
        pytest.skip("needs a Torch for the CPU")
    publish(hub, branches)
    code, answer = doctor(hub, f"{KERNEL}@v1")
    assert (code, answer["loads"]) == ((0, CPU) if options is None else (1, None))
    found = {tuple(option["changes"]): option["variant"] for option in answer["options"]}
    assert found == (options or {})


def test_a_redirect_names_the_repository_that_the_client_loads(hub: RunningHub) -> None:
    publish(hub, {"v1": {CPU: {}}})
    text = b'kind = "redirect"\ndestination = "org/other"\nrevision = "v3"\n'
    status = [CommitOperationAdd("kernel-status.toml", text)]
    hub.api().create_commit(KERNEL, status, repo_type="kernel", revision="v1", commit_message="Move")
    code, answer = doctor(hub, KERNEL)
    assert code == 9 and answer["hint"] == "use org/other@v3"
    resolved = "from huggingface_hub import HfApi; from kernels.status import resolve_status as of; "
    resolved += f"print(*of(HfApi(), {KERNEL!r}, 'v1'))"
    command = [sys.executable, "-c", resolved]
    done = subprocess.run(command, env=hub.environment, capture_output=True, text=True, check=False)
    assert done.stdout == "org/other v3\n", done.stderr
