"""Verification of published kernels, intact and changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd

from kernel_builder.hub.verification import Verification, verify
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.progress import Lines
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import HubError, VerificationError
from tests.support.files import write_files
from tests.support.git import commit_all
from tests.support.places import CPU, PROJECTS
from tests.support.running_hub import RunningHub

from .conftest import edit
from .test_publish import CUDA, DOUBLING, put

pytestmark = pytest.mark.attack
NewCache = Callable[[str], Path]


def check(hub: RunningHub, name: str, **options: Any) -> Verification:
    return verify(name, endpoint=hub.url, **options)


def test_a_file_changed_on_the_hub_is_found(hub: RunningHub, doubling: Path) -> None:
    put(hub, doubling)
    assert check(hub, f"{DOUBLING}@v1").ok
    changed = {f"build/{CUDA}/__init__.py": b"import os\n", "build/torch-cpu/metadata.json.sigstore": b"{}"}
    described = json.loads((doubling / "build/torch-cpu/metadata.json").read_bytes())
    array = json.dumps({**described, "kernel-depends": [["org/other", 1, None]]}).encode()  # which the client loads
    at = {"path_in_repo": "build/torch-cpu/metadata.json", "repo_id": DOUBLING, "repo_type": "kernel", "revision": "v1"}
    hub.api().upload_file(path_or_fileobj=array, **at)
    assert "kernel-depends" in check(hub, DOUBLING).variants[0].digest[0]
    described |= {"backend": "text", "provenance": {"kernel": {"commit": "--orphan=x"}, "kernel-builder": "\x1b[2J"}}
    changed["build/torch-cpu/metadata.json"] = json.dumps(described).encode()
    operations = [CommitOperationAdd(path, content) for path, content in changed.items()]
    hub.api().create_commit(DOUBLING, operations, repo_type="kernel", revision="v1", commit_message="Change files")
    report = check(hub, DOUBLING)
    assert [verdict.ok for verdict in report.variants] == [False, False]
    assert report.variants[0].provenance == {"kernel": {"dirty": False}, "kernel-builder": {}}
    assert report.variants[0].signature not in {"valid", "none"}
    wrong = {verdict.variant: verdict.digest for verdict in report.variants if verdict.digest}
    assert wrong.pop(CUDA) == ("__init__.py has another SHA-256 than the digest of metadata.json",)
    assert "invalid type" in wrong["torch-cpu"][0]
    assert not check(hub, DOUBLING, require_signature=True).variants[0].ok
    with pytest.raises(HubError, match="the kernel does not exist"):
        check(hub, "org/other")
    with pytest.raises(VerificationError, match="are transferred without asking"):
        check(hub, DOUBLING, max_size=0)


def test_a_kernel_is_built_again_at_its_commit(
    hub: RunningHub, scale: Path, new_cache: NewCache, tmp_path: Path
) -> None:
    """Its sources are partly links to files that a repository's kernels share."""
    repository = write_files(tmp_path / "repository", {".gitignore": "build/\n"})
    scale = scale.rename(repository / "scale")
    (scale / "scale").rename(repository / "shared")
    (scale / "scale").symlink_to("../shared")
    commit_all(repository)
    build(BuildRequest((scale,), variants=(CPU,), load=False), Toolchains(cache=new_cache("cache")))
    put(hub, scale, "org/scale")
    card = hub.api().hf_hub_download("org/scale", "README.md", repo_type="kernel", local_dir=tmp_path)
    assert "kernel-builder verify org/scale@v1 --source ." in Path(card).read_text()
    source = scale / "scale/scale_cpu.cpp"
    source.write_text(source.read_text() + "// later\n")
    commit_all(repository, "Later")
    output = StringIO()
    (verdict,) = check(hub, "org/scale", source=scale, progress=Lines(output)).variants
    assert (verdict.rebuilt, verdict.ok) == ("equal", True)
    assert "[1/1] rebuilding 1 variant at commit " in output.getvalue() and "link stable-scale cpu" in output.getvalue()

    other = shutil.copytree(PROJECTS / "full-scale", tmp_path / "other")
    (verdict,) = check(hub, "org/scale", source=other).variants
    assert verdict.rebuilt == "not built: --source has the kernel full_scale, not stable_scale"

    (package,) = (scale / "build").iterdir()
    source.write_text(source.read_text().removesuffix("// later\n"))
    edit(package, "__init__.py", "Scaling", "Scaled")
    put(hub, scale, "org/scale")
    (verdict,) = check(hub, "org/scale", source=scale).variants
    assert (verdict.digest, verdict.rebuilt, verdict.ok) == ((), "differs", False)
    assert set(verdict.differing) == {"__init__.py", "metadata.json"}


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="aarch64-linux-gnu-g++ is not installed")
def test_a_cross_compiled_kernel_is_built_again_in_the_same_way(
    hub: RunningHub, scale: Path, new_cache: NewCache
) -> None:
    """Not where it was compiled in another way: by the g++ of its own platform, or by one of another."""
    arm = CPU.replace("x86_64", "aarch64")
    build(BuildRequest((scale,), variants=(arm, CPU), load=False), Toolchains(cache=new_cache("cache")))
    put(hub, scale, "org/scale")
    assert [verdict.rebuilt for verdict in check(hub, "org/scale", source=scale).variants] == ["equal", "equal"]

    for name, other in ((arm, None), (CPU, {"name": "g++"})):
        path = scale / "build" / name / "metadata.json"
        described = json.loads(path.read_text())
        described["provenance"]["cross-compiler"] = other
        path.write_text(json.dumps(described))
    put(hub, scale, "org/scale")
    result = check(hub, "org/scale", source=scale)
    assert result.ok and not result.is_verified and not result.as_dict()["ok"], "a claim replaces no rebuild"
    assert [verdict.rebuilt for verdict in result.variants] == [
        "not built: it was compiled on aarch64-linux; verify it on that platform",
        "not built: it was cross-compiled, and this machine is x86_64-linux; verify it on another platform",
    ]
