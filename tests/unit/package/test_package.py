"""Each package replaces an older one in one step. Metadata of other tools can be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.package import assembly, swap
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from kernel_format import files
from kernel_format.metadata import PackageMetadata
from kernel_format.signatures import Signers, signature_verdict
from kernel_format.tree_digest import SIGNATURE
from tests.support.files import replace, write_files
from tests.support.kills import killed_at_each_change
from tests.support.places import PROJECTS

OLD = {"torch-cpu": "old", "torch-cuda": "old", "torch-rocm": "old"}
NEW = {"torch-cpu": "new", "torch-cuda": "old", "torch-xpu": "new"}


def write(directory: Path, packages: dict[str, str]) -> None:
    write_files(directory, {f"{name}/metadata.json": text for name, text in packages.items()})


def read(directory: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in directory.glob("*/metadata.json")}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def build(tmp_path: Path) -> Path:
    destination = tmp_path / "build"
    write(destination, OLD)
    (destination / "mine.txt").write_text("mine")
    return destination


def publish_new(build: Path) -> None:
    with swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new", "torch-xpu": "new"})
        swap.publish(staged, build, outdated=["torch-rocm"])


def test_packages_are_replaced_without_an_exchange_of_names(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No file system here refuses RENAME_EXCHANGE, but every one refuses a flag that does not exist.
    monkeypatch.setattr(files, "_RENAME_EXCHANGE", 1 << 20)
    (build / ".staging-killed").mkdir()
    publish_new(build)
    assert read(build) == NEW
    assert names(build) == ["mine.txt", "torch-cpu", "torch-cuda", "torch-xpu"]


def test_each_package_is_old_or_new_whenever_a_build_is_killed(tmp_path: Path) -> None:
    home, seen = tmp_path / "home", []

    def fill() -> None:
        shutil.rmtree(home, ignore_errors=True)
        write(home / "build", OLD)

    fill()
    for call in killed_at_each_change(lambda: publish_new(home / "build")):
        packages = read(home / "build")
        assert packages.items() <= OLD.items() | NEW.items(), call
        assert packages.keys() >= OLD.keys() & NEW.keys(), call
        with swap.staging(home / "build"):
            pass
        assert not any(name.startswith(".") for name in names(home / "build")), call
        seen.append(packages)
        fill()
    assert (seen[0], seen[-1], read(home / "build")) == (OLD, NEW, NEW)


def test_metadata_of_other_tools_is_read_as_far_as_possible() -> None:
    hostile = {"id": 3, "name": "demo-kernel", "version": True, "python-depends": "einops"}
    origins = {"kernel": {"commit": "\x1b[2J", "dirty": 1}, "kernel-builder": []}
    more = {"backend": {"type": "cuda", "archs": ["9.0", 7]}, "provenance": origins}
    read = PackageMetadata.from_json(json.dumps(hostile | more))
    assert (read.id, read.name, read.version, read.python_depends) == (None, "demo-kernel", None, ())
    assert (read.backend, read.archs, read.python_name) == ("cuda", ("9.0",), "demo_kernel")
    assert (read.origin("kernel"), read.origin("kernel-builder"), read.is_dirty) == ({"dirty": True}, {}, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"kernel-depends": {"o/k": 1}}', "not a list"),
        ('{"kernel-depends": [["o/k", 1, null]]}', "an entry of `kernel-depends`"),  # which the client loads
        ('{"kernel-depends": [{"repo-id": "o/k", "revision": ""}]}', "an entry of `kernel-depends`"),
        ('{"kernel-depends": [{"repo-id": ["o/k"], "version": 1}]}', "an entry of `kernel-depends`"),
    ],
)
@pytest.mark.attack
def test_metadata_that_cannot_be_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackageMetadata.from_json(text)


@pytest.mark.attack
def test_long_texts_of_a_package_are_not_parsed_and_no_signature_forges_a_verdict(tmp_path: Path) -> None:
    long = " " * (1 << 20)
    (tmp_path / "metadata.json").write_text("{}")
    forged = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "x\ngood   torch-cpu\n  signature   valid": 1,
    }
    (tmp_path / SIGNATURE).write_text(json.dumps(forged))
    verdict = signature_verdict(tmp_path, Signers())
    assert "good torch-cpu" in verdict and "\n" not in verdict
    (tmp_path / "metadata.json").write_text("{}" + long)
    assert "metadata.json has more than" in signature_verdict(tmp_path, Signers())
    assert PackageMetadata.read(tmp_path) is None
    (tmp_path / SIGNATURE).write_text("{}" + long)
    assert f"{SIGNATURE} has more than" in signature_verdict(tmp_path, Signers())


@pytest.mark.parametrize(
    ("upstream", "written", "minver"),
    [
        ("[]", None, None),
        ('["https://github.com/o/a"]', "https://github.com/o/a", None),
        ('["https://github.com/o/a", "git@h.org:b"]', ["https://github.com/o/a", "git@h.org:b"], "0.18.0"),
    ],
)
def test_several_upstream_repositories_need_a_newer_client(
    tmp_path: Path, upstream: str, written: object, minver: str | None
) -> None:
    project = tmp_path / "python-only"
    shutil.copytree(PROJECTS / "python-only", project)
    replace(project / "build.toml", "[general]\n", f"[general]\nupstream = {upstream}\n")
    (planned,) = plan([(read_project(project), [Variant.parse("torch-cpu")])], Toolchains()).variants
    assembly.assemble(planned, None, tmp_path / "package")
    metadata = json.loads((tmp_path / "package" / "metadata.json").read_text())
    assert (metadata.get("upstream"), metadata.get("kernels-minver")) == (written, minver)
    read = PackageMetadata.read(tmp_path / "package")
    assert read and read.to_dict() == metadata
