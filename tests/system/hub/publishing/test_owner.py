"""Publication under another owner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.hub.verification import verify
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError, PackageError
from tests.support.builder_process import run_builder
from tests.support.places import SOURCES
from tests.support.python_project import write_project
from tests.support.running_hub import RunningHub
from tests.support.torch_process import output_with_torch

from .conftest import put
from .test_sign import OPENSSL, make_key


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A project that loads the project beside it, `base`, from the same owner."""
    write_project(tmp_path / "base", "def twice(x):\n    return 2 * x\n", owner="kernels-community")
    project = write_project(tmp_path / "top", SOURCES["module_with_a_dependency"], "base", owner="kernels-community")
    (project / "CARD.md").write_text(SOURCES["card_of_top"])
    return project


@pytest.mark.attack
def test_a_kernel_and_what_it_loads_for_another_owner(hub: RunningHub, top: Path, tmp_path: Path) -> None:
    environment = {**hub.environment, "KERNEL_BUILDER_CACHE": str(tmp_path / "cache"), "KERNEL_BUILDER_OWNER": "me"}
    for project in (top.with_name("base"), top):
        run_builder(environment, "build-and-upload", project, "--no-load", check=True)
    assert not hub.api().repo_exists("kernels-community/top", repo_type="kernel")

    program = "from kernels import get_kernel; k = get_kernel('me/top', version=1, trust_remote_code=True)"
    loaded = output_with_torch(f"{program}; print(k.twice(21), k.base.__file__)", **hub.environment)
    assert loaded.startswith("42 ") and "me--base" in loaded, loaded

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
        verification = verify("me/top@v1", source=source, endpoint=hub.url)
        assert [verdict.rebuilt for verdict in verification.variants] == ["equal"]
    key = make_key(tmp_path, "signing", *OPENSSL)
    for project, ok in ((top, False), (top.with_name("base"), True)):
        run_builder(environment, "sign", project, "--key", key, check=True)
        run_builder(environment, "upload", project, "--no-load", check=True)
        verification = verify("me/top", signers=[f"{key}.pub"], require_signature=True, endpoint=hub.url)
        (variant,), (base,) = verification.variants, verification.loads
        assert (variant.signature, base.repo_id, verification.ok) == ("valid", "me/base", ok), "the client loads both"


def test_packages_of_another_owner_are_refused(hub: RunningHub, top: Path, tmp_path: Path) -> None:
    build(BuildRequest((top,), load=False), Toolchains(cache=tmp_path / "cache")).raise_error()
    with pytest.raises(PackageError) as raised:
        put(hub, top, None, owner="me")
    expected = "`kernel-depends` is ['kernels-community/base']; expected ['me/base'], as in build.toml or by --owner"
    assert raised.value.message == expected
    assert raised.value.hint and raised.value.hint.endswith(f"kernel-builder build {top} --owner me")
    environment = {**hub.environment, "KERNEL_BUILDER_CACHE": str(tmp_path / "cache")}
    done = run_builder(environment, "upload", top, "--owner", "me", "--build", "--no-load", "--json")
    assert json.loads(done.stdout)["repo-id"] == "me/top", done.stderr


def test_names_of_an_owner(top: Path) -> None:
    project = read_project(top, "me")
    assert project.renamed == {"kernels-community/top": "me/top", "kernels-community/base": "me/base"}
    assert read_project(top, "me", "you/other").renamed["kernels-community/top"] == "you/other"
    assert read_project(top, "kernels-community") == read_project(top)
    config = (top / "build.toml").read_text()
    (top / "build.toml").write_text(config.replace("community/base", "elsewhere/base"))
    assert read_project(top, "me").renamed == {"kernels-community/top": "me/top"}
    (top / "build.toml").write_text(config.replace('\n[general.hub]\nrepo-id = "kernels-community/top"\n', ""))
    project = read_project(top, "me")
    assert (project.hub_repo_id, project.kernel_depends[0].repo_id) == ("me/top", "kernels-community/base")
    with pytest.raises(ConfigError, match="'me/you' is not the name of a user or an organization"):
        read_project(top, "me/you")
