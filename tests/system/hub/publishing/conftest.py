"""Projects with packages that are built once and copied for each test."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import kernels_data
import pytest
import requests
from sigstore.models import ClientTrustConfig

from kernel_builder.hub.publication import Published, PublishRequest
from kernel_builder.hub.publish import publish
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.progress import Progress
from kernel_builder.toolchain import Toolchains
from tests.support.files import replace
from tests.support.places import CPU, PROJECTS
from tests.support.running_hub import RunningHub, running_hub

from . import sigstore_instance

DOUBLING = "org/python-only"
BUILDER = str(Path(sys.executable).with_name("kernel-builder"))


@pytest.fixture(scope="session")
def _running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub"), "--trust", "kernels-community") as running:
        yield running


@pytest.fixture
def hub(_running_hub: RunningHub, tmp_path: Path) -> Iterator[RunningHub]:
    """A Hub without tokens that trusts `kernels-community`: one process, which each test finds without repositories."""
    yield dataclasses.replace(_running_hub, environment={**_running_hub.environment, "HF_HOME": str(tmp_path / "home")})
    listed = requests.get(f"{_running_hub.url}/api/kernels", headers={"Authorization": "Bearer any"}, timeout=10)
    for kernel in listed.json():
        _running_hub.api().delete_repo(kernel["id"], repo_type="kernel")


@pytest.fixture
def own_hub(start_hub: Callable[..., RunningHub]) -> RunningHub:
    """Such a Hub whose log has the requests of one test only."""
    return start_hub("--trust", "kernels-community")


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("built")
    made: dict[str, Path] = {}

    def build_once(project: str, *variants: str) -> Path:
        if project not in made:
            made[project] = root / project
            shutil.copytree(PROJECTS / project, made[project], ignore=shutil.ignore_patterns("build"))
            build(BuildRequest((made[project],), variants=variants, load=False), Toolchains())
        return made[project]

    return build_once


@pytest.fixture
def scale(_built: Callable[..., Path], tmp_path: Path) -> Path:
    """A compiled project with a package for this machine's CPU."""
    return Path(shutil.copytree(_built("stable-scale", CPU), tmp_path / "stable-scale"))


@pytest.fixture
def doubling(_built: Callable[..., Path], tmp_path: Path) -> Path:
    """A Python project with packages for CPU and CUDA."""
    return Path(shutil.copytree(_built("python-only"), tmp_path / "python-only"))


@pytest.fixture
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the identity provider of continuous integration."""
    for name in [name for name in os.environ if name.startswith(("GITHUB_", "ACTIONS_", "GITLAB_", "CI"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def sigstore(no_identity: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[sigstore_instance.Running]:
    """A running Sigstore, whose roots of trust replace the public ones."""
    with sigstore_instance.running() as instance:
        ours = classmethod(lambda cls, offline=False: cls.from_json(instance.trust))
        monkeypatch.setattr(ClientTrustConfig, "production", ours)
        yield instance


def edit(package: Path, name: str, before: str, after: str) -> None:
    """Change a file of a package and of the project, as a new build does, and update the digest in the metadata."""
    replace(package / name, before, after)
    (sources,) = (init.parent for init in package.parent.parent.glob("torch-ext/*/__init__.py"))
    for module in package.glob("*.py"):
        if module.name != "_ops.py":
            shutil.copy(module, sources)
    update_digest(package)


def build_for(project: Path, repo_id: str) -> None:
    """Change the metadata as if the packages of a project without a repository were built for one."""
    for metadata in project.glob("build/*/metadata.json"):
        metadata.write_text(metadata.read_text().replace('"repo-id": null', f'"repo-id": "{repo_id}"'))


def update_digest(package: Path) -> None:
    described = json.loads((package / "metadata.json").read_text())
    computed = kernels_data.Digest.hash_variant(kernels_data.DigestAlgorithm.SHA256, package)
    described["digest"]["files"] = dict(sorted(computed.files.items()))
    (package / "metadata.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def tree(hub: RunningHub, repo_id: str, revision: str) -> dict[str, str]:
    """Return path -> hash of every file of a revision, as the public client lists them."""
    entries = hub.api().list_repo_tree(repo_id, recursive=True, revision=revision, repo_type="kernel")
    return {e.path: e.lfs.sha256 if e.lfs else e.blob_id for e in entries if hasattr(e, "blob_id")}


def commits(hub: RunningHub, repo_id: str, revision: str) -> int:
    """Return the number of commits of a branch."""
    return len(hub.api().list_repo_commits(repo_id, repo_type="kernel", revision=revision))


def put(
    hub: RunningHub, project: Path, repo_id: str | None = DOUBLING, token: str = "any", **options: object
) -> Published:
    """Publish a project without loading its packages."""
    given = {"repo_id": repo_id, "endpoint": hub.url, "load": False, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        return publish(PublishRequest(project, **given), Progress())  # type: ignore[arg-type]


@pytest.fixture
def quick(doubling: Path) -> Path:
    """A project with one package, which this machine cannot load."""
    shutil.rmtree(doubling / "build" / "torch-cpu")
    return doubling
