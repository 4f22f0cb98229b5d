"""Promises of a publication to the users of a version, and its warnings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_builder.hub import package_api
from kernel_format.errors import HubError, KernelBuilderError, PackageError
from tests.support.builder_process import run_builder
from tests.support.running_hub import RunningHub

from .conftest import edit, tree
from .test_publish import CPU, CUDA, DOUBLING, put

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
    source.write_text(source.read_text().replace("x * 2", "2 * x"))
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

    (scale / "scale/scale.h").write_text((scale / "scale/scale.h").read_text() + "// later\n")
    (scale / "scale/scale_cuda.cu").unlink()  # not a source of the package for the CPU
    config = scale / "build.toml"
    config.write_text(config.read_text().replace('language = "cpp-cpu"', 'language = "cpp-cpu"\ncxx-flags = ["-O1"]'))
    (scale / "scale/scale_cuda.cu").write_text("")
    with pytest.raises(PackageError) as raised:
        put(hub, scale)
    assert raised.value.message.splitlines()[2:] == [
        "    build.toml has changed",
        "    scale/scale.h has changed",
    ]
