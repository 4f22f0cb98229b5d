"""Publishing to a real Hub, loading from it with the unmodified client, and promises to the users of a version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.hub import package_api
from kernel_builder.pipeline import BuildRequest, build
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import CheckError, ConfigError, HubError, KernelBuilderError, PackageError
from kernel_hub import tokens
from tests.support.builder_process import run_builder
from tests.support.files import append, replace, write_files
from tests.support.git import commit_all
from tests.support.places import CPU as VARIANT
from tests.support.programs import run, wait_for
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import commit
from tests.support.torch_process import output_with_torch

from .conftest import BUILDER, DOUBLING, build_for, commits, edit, put, tree

REPO = "kernels-community/stable-scale"
CUDA, CPU = "torch-cuda", "torch-cpu"


def test_the_client_loads_a_published_kernel(hub: RunningHub, scale: Path) -> None:
    (scale / "CARD.md").write_text("---\nlibrary_name: kernels\nwidget: kept\n---\n\n# Scale\n\nMy own words.\n")
    write_files(scale / "build" / VARIANT / "__pycache__", {"x.cpython-311.pyc": "code"})
    done = run_builder(hub.environment, "upload", scale, "--repo-id", REPO, "--output-json", check=True)
    first = json.loads(done.stdout)
    assert first["created"] and first["variants"] == [path.name for path in (scale / "build").iterdir()]
    assert len(first["builds"]["sent"]) == 5 and first["builds"]["revision"]
    assert "git does not track the project: only its sources and texts are published" in done.stderr

    on_main = tree(hub, REPO, "main")
    assert {"README.md", "build.toml", "scale/scale.h", "torch-ext/stable_scale/__init__.py"} < set(on_main)
    assert not any(path.startswith("build/") for path in on_main)
    assert all(path.startswith("build/") for path in tree(hub, REPO, "v1") if path != ".gitattributes")

    program = f"import torch; from kernels import get_kernel; k = get_kernel('{REPO}', version=1, backend='cpu')"
    program += "; print(k.scaled(torch.ones(2), 3.0).tolist())"
    assert output_with_torch(program, **hub.environment) == "[3.0, 3.0]"

    card = Path(hub.api().hf_hub_download(REPO, "README.md", repo_type="kernel", local_dir=scale.parent)).read_text()
    for words in (
        "widget: kept",
        "license: apache-2.0",
        "My own words.",
        'stable_scale = get_kernel("kernels-community/stable-scale", version=1)',
        "scaled(input: torch.Tensor, factor: float) -> torch.Tensor",
        "scaled(Tensor input, float factor) -> Tensor",
        "| variant | Torch | size |",
        "| `torch-stable-abi210-cpu-x86_64-linux` | 2.10 and later | ",
        f"These cannot be verified, because no commit has their sources: `{VARIANT}`.",
    ):
        assert words in card, words

    (scale / "CARD.md").unlink()
    (scale / "README.md").write_text(card)
    again = put(hub, scale, REPO)
    assert again.builds.sent == () and again.main and again.main.sent == () and not again.main.removed
    assert commits(hub, REPO, "v1") == 2  # the Hub's first commit, and the publication


def test_links_are_published_as_files_that_build_alone(hub: RunningHub, scale: Path, tmp_path: Path) -> None:
    repository = write_files(tmp_path / "repository", {"kernels/notes.md": "", ".gitignore": "build\nignored.h"})
    kernels = repository / "kernels"
    project = scale.rename(kernels / "stable-scale")
    shutil.move(project / "scale", kernels / "shared")
    (project / "scale").symlink_to("../shared")
    (kernels / "shared" / "up").symlink_to("..")
    (project / "NOTES.md").symlink_to("../notes.md")
    (project / "secret").symlink_to("/etc/hostname")
    (kernels / "shared" / "ignored.h").touch()
    commit_all(repository)
    put(hub, project, REPO)

    on_main = tree(hub, REPO, "main")
    assert {path for path in on_main if path.startswith("scale")} == {
        "scale/scale.h",
        "scale/scale_cpu.cpp",
        "scale/scale_cuda.cu",
    }
    assert {"NOTES.md", "build.toml"} < set(on_main) and "secret" not in on_main
    published = tmp_path / "published"
    hub.api().snapshot_download(REPO, repo_type="kernel", local_dir=published)
    assert not [path for path in published.rglob("*") if path.is_symlink()]
    assert (published / "scale/scale.h").read_bytes() == (kernels / "shared/scale.h").read_bytes()
    run_builder(os.environ, "build", published, "--variant", VARIANT, "--no-load", check=True)
    binary = f"build/{VARIANT}/*.so"
    assert [path.read_bytes() for path in published.glob(binary)] == [
        path.read_bytes() for path in project.glob(binary)
    ]


def test_variants_are_kept_or_pruned(hub: RunningHub, doubling: Path, tmp_path: Path) -> None:
    put(hub, doubling)
    cuda = shutil.move(doubling / "build" / CUDA, tmp_path / "aside")
    result = put(hub, doubling)
    assert (result.kept, result.removed) == ((CUDA,), ()) and not result.builds.sent
    result = put(hub, doubling, prune=True)
    assert (result.kept, result.removed) == ((), (CUDA,))
    assert {path.split("/")[1] for path in tree(hub, DOUBLING, "v1") if path.startswith("build/")} == {CPU}
    shutil.move(cuda, doubling / "build" / CUDA)


def test_packages_of_other_tools_are_compared(hub: RunningHub, quick: Path) -> None:
    put(hub, quick)
    path, older = "build/torch-rocm/python_only/__init__.py", (quick / "build" / CUDA / "__init__.py").read_bytes()
    commit(hub.api(), DOUBLING, path, older, revision="v1")
    edit(quick / "build" / CUDA, "__init__.py", "Doubling in", "Doubled by")
    result = put(hub, quick)
    assert result.kept == ("torch-rocm",) and result.builds.revision
    older = older.replace(b"def doubled(x: torch.Tensor)", b"def doubled(x: torch.Tensor, y=1)")
    commit(hub.api(), DOUBLING, path, older, revision="v1")
    with pytest.raises(HubError, match=r"torch-rocm:\n    doubled\(x, y=1\) becomes doubled\(x\)"):
        put(hub, quick)


def test_the_client_loads_a_kernel_without_torch(hub: RunningHub, copy_project: Callable[..., Path]) -> None:
    project = copy_project("tvm-scale")
    build(BuildRequest((project,), variants=("tvm-ffi01-cpu-x86_64-linux",), load=False), Toolchains())
    run_builder(hub.environment, "upload", project, "--repo-id", REPO, "--no-load", check=True)
    program = f"import numpy; from kernels import get_kernel; k = get_kernel('{REPO}', version=1, backend='cpu')"
    program += "; x = numpy.ones(2, numpy.float32); print(k.scaled(x, 3.0, numpy.empty_like(x)).tolist())"
    assert run(sys.executable, "-c", program, env=hub.environment) == "[3.0, 3.0]\n"
    card = Path(hub.api().hf_hub_download(REPO, "README.md", repo_type="kernel", local_dir=project)).read_text()
    assert "| variant | TVM FFI | size |" in card, card


def test_two_concurrent_publishers_both_succeed(hub: RunningHub, doubling: Path) -> None:
    other = Path(shutil.copytree(doubling, doubling.with_name("other")))
    shutil.rmtree(doubling / "build" / CUDA)
    shutil.rmtree(other / "build" / CPU)
    command = [BUILDER, "upload", "--repo-id", DOUBLING, "--no-load"]
    running = [subprocess.Popen([*command, project], env=hub.environment) for project in (doubling, other)]
    assert [process.wait() for process in running] == [0, 0]
    assert {path.split("/")[1] for path in tree(hub, DOUBLING, "v1") if path.startswith("build/")} == {CPU, CUDA}


def test_pull_requests_do_not_change_the_branches(hub: RunningHub, quick: Path) -> None:
    put(hub, quick)
    before = tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")
    edit(quick / "build" / CUDA, "__init__.py", "Doubling in Python", "Doubling")
    summary = quick.parent / "summary.json"
    command = ["upload", quick, "--repo-id", DOUBLING, "--no-load", "--create-pr", "--output-json", summary]
    run_builder(hub.environment, *command, check=True)
    assert (tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")) == before
    result = json.loads(summary.read_text())
    # The keys of the public tool, which scripts read.
    assert (result["status"], result["repo_id"], result["branch"]) == ("pull_request_created", DOUBLING, "v1")
    assert [(request["branch"], bool(request["url"])) for request in result["pull_requests"]] == [
        ("main", True),
        ("v1", True),
    ]
    assert tree(hub, DOUBLING, result["builds"]["revision"]) != before[0]


def test_versions_and_other_branches(hub: RunningHub, quick: Path, tmp_path: Path) -> None:
    put(hub, quick)
    hub.api().create_branch(DOUBLING, repo_type="kernel", branch="v2")
    (quick / "CARD.md").write_text("# Of an older version\n")
    result = put(hub, quick)
    assert result.main is None and result.note and "version 2" in result.note
    hub.api().create_branch(DOUBLING, repo_type="kernel", branch="trial")
    assert put(hub, quick, branch="trial").builds.removed == ()
    assert "build.toml" in tree(hub, DOUBLING, "trial")

    replace(quick / "build.toml", "version = 1", "version = 2")
    build(BuildRequest((quick,), variants=(CUDA,), load=False), Toolchains(cache=tmp_path / "cache"))
    result = put(hub, quick)
    assert result.main and result.main.revision
    assert not {path for path in tree(hub, DOUBLING, "v2") if not path.startswith((".", "build/"))}


def test_a_signature_is_kept_while_its_metadata_is_unchanged(hub: RunningHub, quick: Path) -> None:
    build_for(quick, DOUBLING)
    put(hub, quick)
    path = f"build/{CUDA}/metadata.json.sigstore"
    commit(hub.api(), DOUBLING, path, b"{}", revision="v1")
    put(hub, quick)
    assert path in tree(hub, DOUBLING, "v1")
    edit(quick / "build" / CUDA, "__init__.py", "Doubling", "Twice")
    put(hub, quick)
    assert path not in tree(hub, DOUBLING, "v1")
    (quick / path).write_text('{"of": "these bytes"}')
    assert put(hub, quick).builds.sent == (path,)


def test_a_dry_run_writes_nothing(own_hub: RunningHub, quick: Path) -> None:
    result = put(own_hub, quick, dry_run=True)
    assert result.created and result.builds.sent and result.main and result.main.sent
    assert not own_hub.api().repo_exists(DOUBLING, repo_type="kernel")
    own_hub.api().create_repo(DOUBLING, repo_type="kernel")
    assert wait_for(lambda: "repos/create" in own_hub.log.read_text())  # a request is logged after its answer
    before = len(own_hub.log.read_text().splitlines())
    assert put(own_hub, quick, dry_run=True).builds.sent
    methods = [json.loads(line)["method"] for line in own_hub.log.read_text().splitlines()[before:]]
    assert methods and set(methods) <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"branch": "main"}, ConfigError, "packages belong on the branch of their version"),
        ({"branch": "v2"}, ConfigError, "the project's version is 1"),
        ({"repo_id": "../etc/passwd"}, HubError, "not a valid repository name"),
        ({"repo_id": "unowned"}, HubError, "the organization is missing"),
        ({"repo_id": None}, ConfigError, "there is no repository to publish to"),
        ({"endpoint": "http://127.0.0.1:9"}, HubError, r"no connection to http://127\.0\.0\.1:9"),
    ],
)
def test_wrong_requests_are_refused(
    hub: RunningHub, quick: Path, options: dict[str, Any], error: type[KernelBuilderError], message: str
) -> None:
    with pytest.raises(error, match=message):
        put(hub, quick, **options)


def test_a_tampered_package_is_not_published(hub: RunningHub, quick: Path) -> None:
    append(quick / "build" / CUDA / "__init__.py", "# once more\n")
    with pytest.raises(CheckError, match=r"__init__.py: has another SHA-256 .*, in torch-cuda"):
        put(hub, quick)
    assert not hub.api().repo_exists(DOUBLING, repo_type="kernel")


def test_missing_write_permission_is_reported(
    start_hub: Callable[..., RunningHub], quick: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    reader = tokens.add(file, "reader", read=("org",), write=())
    other, writer = (tokens.add(file, name, read=(), write=(name,)) for name in ("other", "org"))
    hub = start_hub("--token-file", str(file))
    for secret in (reader, other, "unknown"):
        with pytest.raises(HubError) as raised:
            put(hub, quick, token=secret)
        assert raised.value.hint and "token" in raised.value.hint
    assert put(hub, quick, token=writer, dry_run=True).builds.sent
    assert put(hub, quick, token=writer).builds.revision
    environment = {k: v for k, v in hub.environment.items() if k != "HF_TOKEN"}
    done = run_builder(environment, "upload", quick, "--repo-id", DOUBLING)
    assert done.returncode == HubError.exit_code and "hf auth login" in done.stderr


LAYERS = '\n\nclass Doubler:\n    """A layer."""\n\n    def forward(self, x):\n        return ops.doubled(x)\n'


def refused(hub: RunningHub, project: Path, kind: type[KernelBuilderError], **options: object) -> KernelBuilderError:
    """Publish, and return the error; nothing may have been sent."""
    before = tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")
    with pytest.raises(kind) as raised:
        put(hub, project, **options)  # type: ignore[arg-type]
    assert (tree(hub, DOUBLING, "v1"), tree(hub, DOUBLING, "main")) == before
    return raised.value


def test_an_api_change_within_a_version_is_refused(hub: RunningHub, doubling: Path) -> None:
    """All variants are replaced together, but callers of the version would break."""
    packages = [doubling / "build" / name for name in (CPU, CUDA)]
    for package in packages:
        edit(package, "__init__.py", '__all__ = ["doubled"]', '__all__ = ["Doubler", "doubled"]')
        edit(package, "__init__.py", "\n\n__all__", f"{LAYERS}\n\n__all__")
    put(hub, doubling)
    for package in packages:
        edit(package, "__init__.py", LAYERS, "")
        edit(package, "__init__.py", '["Doubler", "doubled"]', '["doubled"]')
    error = refused(hub, doubling, HubError)
    assert str(error) == (
        "org/python-only@v1: the API of version 1 would break its callers:\n"
        "  class Doubler is gone\n"
        "  Doubler.forward(self, x) is gone"
    )
    assert error.hint == "set `version = 2` in build.toml and build again; or publish it with --allow api-change"
    put(hub, doubling, allow=("api-change",))
    for package in packages:
        edit(package, "__init__.py", '"""Doubling in', 'new = 1\n"""Doubling in')
        edit(package, "__init__.py", '["doubled"]', '["doubled", "new"]')
    assert put(hub, doubling).api_changes == ("attribute new is new",)


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
    apis = [package_api.read(package) for package in packages]
    assert apis[0].differences(apis[1]) == ("python_only(x, by=2) becomes python_only(x)",)
    refused(hub, doubling, PackageError)


def test_packages_of_other_sources_are_refused(hub: RunningHub, doubling: Path, scale: Path, tmp_path: Path) -> None:
    source = doubling / "torch-ext/python_only/__init__.py"
    put(hub, doubling)
    replace(source, "x * 2", "2 * x")
    (source.parent / "later.py").write_text("")
    error = refused(hub, doubling, PackageError)
    assert error.message == (
        "packages were not built from the project's sources:\n"
        "  torch-cpu, torch-cuda:\n"
        "    torch-ext/python_only/__init__.py has changed\n"
        "    torch-ext/python_only/later.py is new"
    )
    assert error.hint == f"rebuild: kernel-builder build {doubling}"
    hub.environment["KERNEL_BUILDER_CACHE"] = str(tmp_path / "cache")
    command = ["upload", doubling, "--repo-id", DOUBLING, "--no-load", "--build", "--json"]
    done = run_builder(hub.environment, *command, check=True)
    assert {f"build/{name}/later.py" for name in (CPU, CUDA)} < set(json.loads(done.stdout)["builds"]["sent"])

    append(scale / "scale/scale.h", "// later\n")
    (scale / "scale/scale_cuda.cu").unlink()  # not a source of the package for the CPU
    replace(scale / "build.toml", 'language = "cpp-cpu"', 'language = "cpp-cpu"\ncxx-flags = ["-O1"]')
    (scale / "scale/scale_cuda.cu").write_text("")
    with pytest.raises(PackageError) as raised:
        put(hub, scale)
    assert raised.value.message.splitlines()[2:] == ["    build.toml has changed", "    scale/scale.h has changed"]
