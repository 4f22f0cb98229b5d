"""Descriptions of published kernels, read by ranges from a Hub, whole, and from a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pygit2
import pytest
import torch
from packaging.version import Version

from kernel_builder.hub.audit import audit
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_format.metadata import PackageMetadata
from tests.support.builder_process import run_builder
from tests.support.loopback import QuietHandler, served
from tests.support.places import CPU, CUDA
from tests.support.programs import run
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import commit

from .conftest import edit, put, update_digest

SCALE = "org/scale"


def pad(package: Path, size: int) -> None:
    """Add a section to the binary of a package, as large as the device code of a large kernel."""
    (binary,) = package.glob("*.so")
    content = package.parent / "padding"
    content.write_bytes(bytes(range(256)) * (size // 256))
    subprocess.run(["objcopy", "--add-section", f".padding={content}", binary], check=True)
    content.unlink()
    update_digest(package)


def test_a_kernel_is_described_from_a_small_part_of_its_bytes(hub: RunningHub, scale: Path) -> None:
    run_builder(os.environ, "build", scale, "--variant", CUDA, "--no-load", check=True)
    pad(scale / "build" / CUDA, 35_000_000)
    put(hub, scale, SCALE)
    local, remote = audit(str(scale)), audit(f"{SCALE}@v1", endpoint=hub.url)
    assert 0 < remote.downloaded <= 2_000_000
    assert remote == replace(local, name=remote.name, downloaded=remote.downloaded)
    assert remote.loads == CPU
    of_cpu, of_cuda = remote.variants
    assert of_cpu.changes == () and of_cuda.changes == ("Torch for CUDA 13.0 and later 13.x",)
    needed = {"Torch": "2.10 and later", "CUDA": "13.0 and later 13.x", "Python": "3.5 and later"}
    assert needed.items() < of_cuda.requires.items() and "GLIBC" in of_cuda.requires
    metadata = PackageMetadata.read(scale / "build" / CUDA)
    assert metadata and tuple(of_cuda.device_code) == tuple(arch.removesuffix("+PTX") for arch in metadata.archs)
    assert all(row["sass"] for row in of_cuda.device_code.values())
    assert {name.rpartition("::")[2]: set(archs) for name, archs in of_cuda.kernels.items()} == {
        "kernel(float*, float const*, float, long)": set(metadata.archs)
    }
    assert "libtorch_cuda.so" in of_cuda.libraries and of_cuda.symbols["the CUDA runtime"]
    assert [op["fake"] for op in of_cuda.ops] == [True]
    assert of_cuda.rebuild.startswith("no: ")


def test_findings_and_changes_of_the_api_decide_the_exit_code(hub: RunningHub, scale: Path) -> None:
    put(hub, scale, SCALE)

    def audited(*options: str) -> tuple[int, dict[str, object]]:
        done = run_builder(hub.environment, "audit", f"{SCALE}@v1", "--json", *options)
        return done.returncode, json.loads(done.stdout)

    assert audited("--load")[0] == 0
    first = hub.api().list_repo_commits(SCALE, repo_type="kernel", revision="v1")[0].commit_id
    signature = 'factor: float) -> torch.Tensor:\n    "'
    edit(scale / "build" / CPU, "__init__.py", signature, signature.replace(")", ", by: int)"))
    changed = (scale / "build" / CPU / "__init__.py").read_bytes()
    commit(hub.api(), SCALE, f"build/{CPU}/__init__.py", changed, revision="v1")
    code, answer = audited("--since", first)
    assert code == 1
    assert [finding["check"] for finding in answer["variants"][0]["findings"]] == ["digest"]
    assert answer["api_changes"] == ["scaled(input, factor) becomes scaled(input, factor, by)"]
    assert audited("--allow", "digest")[0] == 0


@pytest.mark.attack
@pytest.mark.skipif("+cpu" not in torch.__version__, reason="needs a Torch for the CPU")
def test_the_nearest_variant_and_a_redirect_are_named(hub: RunningHub) -> None:
    hub.api().create_repo(SCALE, repo_type="kernel")
    hub.api().create_branch(SCALE, repo_type="kernel", branch="v1")
    other = Version(torch.__version__).minor - 1

    on_v1 = partial(commit, hub.api(), SCALE, revision="v1")

    def printed(code: int, command: str = "audit") -> str:
        done = run_builder(hub.environment, command, SCALE)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    old = f"torch2{other}-cxx11-cpu-x86_64-linux"
    on_v1(f"build/{CPU.replace('x86_64', 'aarch64')}/metadata.json", b'{"kernels-minver": "99.1.0"}')
    on_v1(f"build/{old}/metadata.json", b"{}")
    assert f"loads here: no; nearest: {old}, which needs Torch 2.{other}" in printed(1)
    on_v1("kernel-status.toml", b'kind = "redirect"\ndestination = "org/other"\nrevision = "v3"\n')
    assert "use org/other@v3" in printed(9) and "use org/other@v3" in printed(9, "verify")
    resolved = "from huggingface_hub import HfApi; from kernels.status import resolve_status as of; "
    resolved += f"print(*of(HfApi(), {SCALE!r}, 'v1'))"
    assert run(sys.executable, "-c", resolved, env=hub.environment) == "org/other v3\n"
    git = pygit2.Repository(str(hub.root / f"repositories/{SCALE}.git"))
    git.references.create("refs/heads/v1_0", git.references["refs/heads/main"].target)
    assert "read the branch v1_0 as a version" in printed(10, "verify")


def test_storage_that_the_hub_redirects_to_does_not_get_the_token() -> None:
    requested: list[tuple[str, str | None]] = []

    class Storage(QuietHandler):
        def do_GET(self) -> None:
            requested.append(("storage", self.headers["Authorization"]))
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.send(206, bytes(range(first, last + 1)))

    with served(Storage) as storage:

        class Hub(QuietHandler):
            def do_GET(self) -> None:
                requested.append(("hub", self.headers["Authorization"]))
                self.send(302, Location=f"{storage}/blob")

        with served(Hub) as url:
            repository = RemoteRepository(SCALE, endpoint=url, token="hf_secret")
            assert repository.read_range("v1", "a.so", 40, 44) == bytes(range(40, 44))
    assert requested == [("hub", "Bearer hf_secret"), ("storage", None)]
