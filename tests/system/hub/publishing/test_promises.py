"""Promises of a publication to the users of a version, and its warnings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kernel_builder.hub import package_api
from kernel_builder.hub.publication import PublishRequest
from kernel_builder.hub.publish import publish
from kernel_format.errors import ConfigError, HubError, KernelBuilderError, PackageError
from tests.support.running_hub import RunningHub

from .conftest import edit, tree
from .test_publish import BUILDER, CPU, CUDA, DOUBLING, put

LAYERS = '\n\nclass Doubler:\n    """A layer."""\n\n    def forward(self, x):\n        return ops.doubled(x)\n'


def upload(hub: RunningHub, project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [BUILDER, "upload", project, "--repo-id", DOUBLING, "--no-load", *options]
    return subprocess.run(command, env=hub.environment, capture_output=True, text=True, check=False)


def refused(hub: RunningHub, project: Path, kind: type[KernelBuilderError], **options: object) -> KernelBuilderError:
    """Publish, and return the error; nothing may have been sent."""
    before = tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")
    with pytest.raises(kind) as raised:
        put(hub, project, **options)  # type: ignore[arg-type]
    assert (tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")) == before
    return raised.value


def card(hub: RunningHub, directory: Path) -> str:
    path = hub.api().hf_hub_download(DOUBLING, "README.md", repo_type="kernel", local_dir=directory)
    return Path(path).read_text()


def test_an_api_change_within_a_version_needs_a_reason(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    """All variants are replaced together, but callers of the version would break."""
    packages = [doubling / "build" / name for name in (CPU, CUDA)]
    for package in packages:
        edit(package, "__init__.py", '__all__ = ["doubled"]', '__all__ = ["Doubler", "doubled"]')
        edit(package, "__init__.py", "\n\n__all__", f"{LAYERS}\n\n__all__")
    put(hub, doubling)
    for package in packages:
        edit(package, "__init__.py", LAYERS, "")
        edit(package, "__init__.py", '["Doubler", "doubled"]', '["doubled"]')
        edit(package, "__init__.py", "def _doubled(x: torch.Tensor)", "def _doubled(x: torch.Tensor, by: int = 2)")
    error = refused(hub, doubling, HubError)
    assert str(error) == (
        "org/python-only@v1: the API of version 1 would break its callers:\n"
        "  class Doubler is gone\n"
        "  Doubler.forward(self, x) is gone\n"
        "  operator doubled(x: torch.Tensor) -> torch.Tensor becomes "
        "doubled(x: torch.Tensor, by: int=2) -> torch.Tensor"
    )
    assert error.hint == (
        "set `version = 2` in build.toml and build again; or publish it with a reason for the card: "
        '--allow-api-change "REASON"'
    )
    assert "expected the reason" in str(refused(hub, doubling, ConfigError, allow_api_change=" "))
    put(hub, doubling, allow_api_change="no  user could load it")
    section = "## API changes within version 1\n\nno user could load it\n\n- `class Doubler is gone`\n"
    assert section in card(hub, tmp_path)
    for package in packages:
        edit(package, "__init__.py", '"""Doubling in', 'new = 1\n"""Doubling in')
        edit(package, "__init__.py", '["doubled"]', '["doubled", "new"]')
    assert put(hub, doubling).api_changes == ("attribute new is new",)
    assert section in card(hub, tmp_path), "the reason is lost by the next publication"


def test_packages_are_published_without_bytecode(hub: RunningHub, doubling: Path) -> None:
    for name in (CPU, CUDA):
        cache = doubling / "build" / name / "__pycache__"
        cache.mkdir()
        (cache / "__init__.cpython-311.pyc").write_bytes(b"code")
    done = upload(hub, doubling)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [name for name in tree(hub, DOUBLING, "v1") if "pycache" in name]


def test_a_function_of_the_kernels_own_name_is_a_function(hub: RunningHub, doubling: Path) -> None:
    """The directory for old clients has the same name."""
    packages = [doubling / "build" / name for name in (CPU, CUDA)]
    for package in packages:
        edit(package, "__init__.py", "def doubled(x: torch.Tensor)", "def python_only(x: torch.Tensor)")
        edit(package, "__init__.py", '["doubled"]', '["python_only"]')
    member = package_api.read(packages[0]).members["python_only"]
    assert (member.kind, member.call) == ("function", "(x)")
    put(hub, doubling)
    edit(packages[0], "__init__.py", "def python_only(x: torch.Tensor)", "def python_only(x: torch.Tensor, by=2)")
    assert "  python_only(x, by=2) becomes python_only(x)" in str(refused(hub, doubling, PackageError))


def test_packages_of_other_sources_are_refused(hub: RunningHub, doubling: Path, scale: Path, tmp_path: Path) -> None:
    source = doubling / "torch-ext/python_only/__init__.py"
    put(hub, doubling)
    source.write_text(source.read_text().replace("x * 2", "2 * x"))
    (source.parent / "later.py").write_text("")
    error = refused(hub, doubling, PackageError)
    assert error.message == (
        "packages were not built from the sources to publish:\n"
        "  torch-cpu, torch-cuda:\n"
        "    torch-ext/python_only/__init__.py has changed\n"
        "    torch-ext/python_only/later.py is new"
    )
    assert error.hint == (
        f"rebuild: kernel-builder build {doubling}, or rebuild in the same command: "
        f"kernel-builder upload {doubling} --build"
    )
    hub.environment["KERNEL_BUILDER_CACHE"] = str(tmp_path / "cache")
    done = upload(hub, doubling, "--build", "--json")
    assert done.returncode == 0, done.stderr
    assert {f"build/{name}/later.py" for name in (CPU, CUDA)} < set(json.loads(done.stdout)["builds"]["sent"])

    (scale / "scale/scale.h").write_text((scale / "scale/scale.h").read_text() + "// later\n")
    (scale / "scale/scale_cuda.cu").unlink()  # not a source of the package for the CPU
    config = scale / "build.toml"
    config.write_text(config.read_text().replace('backend = "cpu"', 'backend = "cpu"\ncxx-flags = ["-O1"]'))
    (scale / "scale/scale_cuda.cu").write_text("")
    with pytest.raises(PackageError) as raised:
        put(hub, scale)
    assert raised.value.message.splitlines()[2:] == [
        "    the settings of its cpu variants in build.toml have changed",
        "    scale/scale.h has changed",
    ]


def test_sources_without_a_commit_are_published_with_a_warning(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    done = upload(hub, doubling)
    assert done.returncode == 0, done.stderr
    assert (
        "warning: no commit has the sources of torch-cpu, torch-cuda, so users cannot verify them; commit the "
        "sources, build and upload again\n"
    ) in done.stdout
    assert "These cannot be verified, because no commit has their sources: `torch-cpu`, `torch-cuda`." in card(
        hub, tmp_path
    )
    assert "not loaded here: torch-cpu, torch-cuda: --no-load\n" in done.stdout
    assert "kernel-builder verify" not in card(hub, tmp_path)


def test_a_new_branch_reports_only_its_own_files(hub: RunningHub, doubling: Path) -> None:
    """A Hub starts a branch as a copy of main; its files do not count as removed."""
    put(hub, doubling)
    (doubling / "build.toml").write_text((doubling / "build.toml").read_text().replace("version = 1", "version = 2"))
    for name in (CPU, CUDA):
        edit(doubling / "build" / name, "metadata.json", '"version": 1\n', '"version": 2\n')
    done = upload(hub, doubling)
    assert "\nv2: 8 files sent (0.0 MiB), 0 unchanged, 0 removed\n" in done.stdout, done.stdout
    assert "build.toml" not in tree(hub, DOUBLING, "v2")


def test_an_unreachable_hub_is_reported(doubling: Path) -> None:
    with pytest.raises(HubError) as raised:
        publish(PublishRequest(doubling, repo_id=DOUBLING, endpoint="http://127.0.0.1:9", token="any", load=False))
    assert raised.value.message == "cannot list its branches: no connection to http://127.0.0.1:9"
    assert raised.value.hint == (
        "check that the Hub is running, or set $HF_ENDPOINT to another one; then run the same command again: uploaded "
        "files are kept"
    )
