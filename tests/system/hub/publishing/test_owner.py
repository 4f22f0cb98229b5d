"""Publication under another owner, and repositories with packages of other sources."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.config.ownership import in_text
from kernel_builder.config.project_files import read_project
from kernel_builder.hub.verification import verify
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError, HubError, PackageError
from kernel_format.tree_digest import hash_tree
from tests.support.places import ROOT
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import publish_kernel, write_kernel

from .conftest import BUILDER, DOUBLING, edit, put, tree

_BUILD_TOML = """\
[general]
name = "{name}"
version = 1
edition = 5
license = "apache-2.0"
backends = ["cpu"]
{depends}
[general.hub]
repo-id = "kernels-community/{name}"

[torch-noarch]
"""
_TOP = """\
import json
from pathlib import Path

from kernels import get_kernel_dep

_METADATA = json.loads((Path(__file__).parent / "metadata.json").read_text())
(base,) = (get_kernel_dep(depend["repo-id"]) for depend in _METADATA["kernel-depends"])


def twice(x):
    return base.twice(x)
"""
_CARD = """\
    top = get_kernel("kernels-community/top", version=1)
    layer = "kernels-community/base:Layer" # of https://huggingface.co/kernels-community/base.
    other = "kernels-community/base-2", "my-kernels-community/base", "kernels-community/top.old"
"""


def write_project(directory: Path, python: str, depends: str = "") -> Path:
    package = directory / "torch-ext" / directory.name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(python)
    (directory / "build.toml").write_text(_BUILD_TOML.format(name=directory.name, depends=depends))
    return directory


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A project that loads the project beside it, `base`, from the same owner."""
    write_project(tmp_path / "base", "def twice(x):\n    return 2 * x\n")
    depends = 'kernel-depends = [{ repo-id = "kernels-community/base", version = 1 }]\n'
    project = write_project(tmp_path / "top", _TOP, depends)
    (project / "CARD.md").write_text(_CARD)
    return project


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUILDER, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False)


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def built_from_commit(project: Path, cache: Path) -> Path:
    """Build a project from a commit of a new git repository."""
    (project / ".gitignore").write_text("build/\n")
    git(project, "init", "--quiet")
    return rebuilt(project, cache)


def rebuilt(project: Path, cache: Path) -> Path:
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--allow-empty", "-m", "A commit")
    shutil.rmtree(project / "build", ignore_errors=True)
    build(BuildRequest((project,), load=False), Toolchains(cache=cache)).raise_error()
    return project


def refused(hub: RunningHub, project: Path, repo_id: str = DOUBLING, **options: Any) -> HubError:
    with pytest.raises(HubError) as raised:
        put(hub, project, repo_id, **options)
    return raised.value


def test_a_kernel_and_what_it_loads_for_another_owner(hub: RunningHub, top: Path, tmp_path: Path) -> None:
    environment = {**hub.environment, "KERNEL_BUILDER_CACHE": str(tmp_path / "cache"), "KERNEL_BUILDER_OWNER": "me"}
    for project in (top.with_name("base"), top):
        done = run(environment, "build-and-upload", project, "--no-load")
        assert done.returncode == 0, done.stderr
    assert not hub.api().repo_exists("kernels-community/top", repo_type="kernel")

    program = "from kernels import get_kernel; k = get_kernel('me/top', version=1, trust_remote_code=True)"
    loaded = subprocess.run(
        [sys.executable, "-c", f"{program}; print(k.twice(21), k.base.__file__)"],
        env=hub.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.stdout.startswith("42 "), loaded.stderr
    assert "me--base" in loaded.stdout

    published = tmp_path / "published"
    hub.api().snapshot_download("me/top", repo_type="kernel", local_dir=published)
    assert "kernels-community" not in (published / "build.toml").read_text()
    owned = read_project(published)
    assert (owned.hub_repo_id, [depend.repo_id for depend in owned.kernel_depends]) == ("me/top", ["me/base"])
    card = 'get_kernel("me/top", version=1)', '"me/base:Layer" # of https://huggingface.co/me/base.\n'
    for text in (*card, '"kernels-community/base-2", "my-kernels-community/base", "kernels-community/top.old"'):
        assert text in (published / "README.md").read_text()
        assert text in (published / "CARD.md").read_text()
    # Rebuilt from the local sources, and from the published ones.
    for source in (top, published):
        verification = verify("me/top@v1", source=source, endpoint=hub.url, token="any")
        assert [verdict.rebuilt for verdict in verification.variants] == ["equal"]


def test_packages_of_two_owners_differ_in_their_metadata(tmp_path: Path) -> None:
    for owner in (None, "me"):
        request = BuildRequest((ROOT / "kernels/blocks",), out=tmp_path / str(owner), owner=owner, load=False)
        build(request, Toolchains(cache=tmp_path / "cache")).raise_error()
    names = {path.name for path in (tmp_path / "me").glob("[!.]*")}
    assert names
    for name in names:
        first, second = (hash_tree(tmp_path / owner / name).files for owner in ("None", "me"))
        assert {path for path in first | second if first.get(path) != second.get(path)} == {"metadata.json"}
        described = json.loads((tmp_path / "me" / name / "metadata.json").read_text())
        assert {depend["repo-id"] for depend in described["kernel-depends"]} == {
            f"me/{kernel}" for kernel in ("adaln", "decode", "geglu", "rmsnorm", "rope3d")
        }
        assert described["kernels-minver"] == "0.17.0"


def test_packages_of_another_owner_are_refused(hub: RunningHub, top: Path, tmp_path: Path) -> None:
    build(BuildRequest((top,), load=False), Toolchains(cache=tmp_path / "cache")).raise_error()
    with pytest.raises(PackageError) as raised:
        put(hub, top, "me/")
    assert raised.value.message == (
        "the package was built for another owner: it loads kernels-community/base, and for me it has to load me/base"
    )
    assert raised.value.hint and raised.value.hint.endswith(f"kernel-builder build {top} --owner me")
    done = run(
        {**hub.environment, "KERNEL_BUILDER_CACHE": str(tmp_path / "cache")},
        *("upload", top, "--owner", "me", "--build", "--no-load", "--json"),
    )
    assert json.loads(done.stdout)["repo-id"] == "me/top", done.stderr


def test_names_of_an_owner(top: Path) -> None:
    project = read_project(top, "me")
    assert project.renamed == {"kernels-community/top": "me/top", "kernels-community/base": "me/base"}
    assert read_project(top, "me", "you/other").renamed["kernels-community/top"] == "you/other"
    assert read_project(top, "kernels-community") == read_project(top)
    assert (
        in_text(project, "kernels-community/top@v1, kernels-community/topper") == "me/top@v1, kernels-community/topper"
    )
    config = (top / "build.toml").read_text()
    (top / "build.toml").write_text(config.replace("community/base", "elsewhere/base"))
    assert read_project(top, "me").renamed == {"kernels-community/top": "me/top"}
    (top / "build.toml").write_text(config.replace('\n[general.hub]\nrepo-id = "kernels-community/top"\n', ""))
    project = read_project(top, "me")
    assert (project.hub_repo_id, project.kernel_depends[0].repo_id) == ("me/top", "kernels-community/base")
    with pytest.raises(ConfigError, match="'me/you' is not the name of a user or an organization"):
        read_project(top, "me/you")


def test_a_repository_of_another_builder_is_not_overwritten(hub: RunningHub, quick: Path, tmp_path: Path) -> None:
    publish_kernel(hub, write_kernel(tmp_path / "foreign", repo_id=DOUBLING), repo_id=DOUBLING)
    before = tree(hub, DOUBLING, "v1")
    error = refused(hub, quick)
    assert error.message == (
        "the repository's packages come from other sources:\n"
        "  torch-cpu@v1: another builder, which did not record the sources\n"
        f"  the packages to publish: {quick}, without a commit"
    )
    assert error.where == f"{hub.url}/kernels/{DOUBLING}"
    assert (
        error.hint and "--owner NAME or $KERNEL_BUILDER_OWNER" in error.hint and "--allow other-sources" in error.hint
    )
    refused(hub, quick, dry_run=True)
    # Also if the new version has its own branch.
    (quick / "build.toml").write_text((quick / "build.toml").read_text().replace("version = 1", "version = 2"))
    edit(quick / "build/torch-cuda", "metadata.json", '"version": 1\n', '"version": 2\n')
    refused(hub, quick)
    assert tree(hub, DOUBLING, "v1") == before and "v2" not in {
        b.name for b in hub.api().list_repo_refs(DOUBLING, repo_type="kernel").branches
    }
    assert put(hub, quick, allow=("other-sources",)).builds.revision
    assert put(hub, quick).builds.sent == ()  # the repository now has these sources


def test_a_commit_that_the_repository_has(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    project = built_from_commit(doubling, cache)
    first = git(project, "rev-parse", "HEAD")
    put(hub, project)
    put(hub, rebuilt(project, cache))
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    git(clone, "remote", "set-url", "origin", "https://me:secret@git.example.org/me/clone.git")
    put(hub, rebuilt(clone, cache))

    other = tmp_path / "other"
    shutil.copytree(clone, other, ignore=shutil.ignore_patterns(".git", "build"))
    (other / "torch-ext/python_only/__init__.py").open("a").write("# another history\n")
    built_from_commit(other, cache)
    error = refused(hub, other)
    theirs, ours = git(clone, "rev-parse", "HEAD")[:12], git(other, "rev-parse", "HEAD")[:12]
    assert error.message == (
        "the repository's packages come from other sources:\n"
        f"  torch-cpu@v1, torch-cuda@v1: commit {theirs}\n"
        f"  the packages to publish: commit {ours} of {other}"
    )
    assert error.hint and "shallow" not in error.hint
    assert first != theirs

    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone}", str(shallow))
    (shallow / "torch-ext/python_only/__init__.py").open("a").write("# later\n")
    put(hub, rebuilt(shallow, cache))
    error = refused(hub, project)
    assert error.hint and error.hint.startswith("publish to another owner")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{other}", str(tmp_path / "shallow-2"))
    rebuilt(tmp_path / "shallow-2", cache)
    error = refused(hub, tmp_path / "shallow-2")
    assert error.hint and "`git fetch --unshallow`" in error.hint


def test_the_source_that_build_toml_names(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    """It identifies sources whose git history was rewritten."""

    def with_source(project: Path, url: str) -> Path:
        config = (project / "build.toml").read_text()
        lines = [line for line in config.splitlines() if not line.startswith("source")]
        (project / "build.toml").write_text(
            "\n".join(lines).replace("[general]", f'[general]\nsource = "{url}"') + "\n"
        )
        return project

    cache = tmp_path / "cache"
    put(hub, built_from_commit(with_source(doubling, "https://example.org/me/doubling"), cache))
    shutil.rmtree(doubling / ".git")
    put(hub, built_from_commit(with_source(doubling, "git@example.org:me/doubling.git"), cache))
    shutil.rmtree(doubling / ".git")
    built_from_commit(with_source(doubling, "https://example.org/you/doubling"), cache)
    assert "of example.org/me/doubling" in refused(hub, doubling).message
