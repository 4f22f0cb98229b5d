"""Packages replace older ones in one step, also after a killed build. Metadata of other tools can be read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from kernel_builder.package import swap
from kernel_format.errors import PackageError
from kernel_format.metadata import PackageMetadata
from tests.support.kills import killed_at_each_change

OLD = {"torch-cpu": "old", "torch-cuda": "old", "torch-rocm": "old"}
NEW = {"torch-cpu": "new", "torch-cuda": "old", "torch-xpu": "new"}


def write(directory: Path, packages: dict[str, str]) -> None:
    for name, text in packages.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "metadata.json").write_text(text)


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


def test_all_packages_change_in_one_step(build: Path) -> None:
    """A process that has the old directory open still sees all old packages."""
    (build / "mine.txt").unlink()
    before = os.open(build, os.O_RDONLY)
    with swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new", "torch-xpu": "new"})
        seen = Path(f"/proc/self/fd/{before}")
        assert read(build) == OLD
        swap.publish(staged, build, replace_all=["torch-rocm"])
        assert read(build) == NEW
        assert read(seen) == OLD
    os.close(before)
    assert names(build.parent) == ["build"]


def test_packages_beside_other_files_are_replaced_one_by_one(build: Path) -> None:
    before = [path.stat().st_ino for path in (build, build / "mine.txt")]
    with swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new", "torch-xpu": "new"})
        swap.publish(staged, build, replace_all=["torch-rocm"])
    assert read(build) == NEW
    assert [path.stat().st_ino for path in (build, build / "mine.txt")] == before
    assert names(build.parent) == ["build"]


def test_the_current_directory_is_not_swapped(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(build)
    with swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new", "torch-xpu": "new"})
        swap.publish(staged, build, replace_all=["torch-rocm"])
    assert read(Path()) == NEW
    assert names(Path()) == ["mine.txt", "torch-cpu", "torch-cuda", "torch-xpu"]


def test_a_failure_changes_nothing(build: Path) -> None:
    with pytest.raises(PackageError) as caught, swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new"})
        raise OSError(28, "No space left on device", str(staged / "torch-cpu"))
    assert "No space left on device" in caught.value.message
    assert read(build) == OLD
    assert names(build.parent) == ["build"]


@pytest.mark.parametrize("inside", [False, True])
def test_leftovers_of_killed_builds_are_undone(build: Path, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """On a file system that cannot swap in one step, a build can be killed before, between and after two renames."""
    if inside:
        monkeypatch.chdir(build)
        home, cut_off = build, build / "torch-cuda"
        write(home, {f".{build.name}.staging-killed": "half"})
        write(home, {".torch-cpu.previous": "old"})
        (build / "torch-cpu" / "metadata.json").write_text("half")
    else:
        home, cut_off = build.parent, build
        write(home, {f".{build.name}.staging-killed": "half", ".other.previous": "not ours"})
    cut_off.rename(cut_off.with_name(f".{cut_off.name}.previous"))
    with swap.staging(build) as staged:
        assert names(staged) == []
        assert read(build) == OLD
    assert names(build) == ["mine.txt", "torch-cpu", "torch-cuda", "torch-rocm"]
    assert names(build.parent) == (["build"] if inside else [".other.previous", "build"])


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_packages_are_old_or_new_whenever_a_build_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool, alone: bool
) -> None:
    """All at once, or one by one beside other files; where nothing can be swapped, once the next build starts."""
    if not swaps:
        monkeypatch.setattr(swap, "_RENAME_EXCHANGE", 1 << 20)
    home, seen = tmp_path / "home", []

    def fill() -> None:
        shutil.rmtree(home, ignore_errors=True)
        write(home / "build", OLD)
        if not alone:
            (home / "build" / "mine.txt").write_text("mine")

    def publish() -> None:
        with swap.staging(home / "build") as staged:
            write(staged, {"torch-cpu": "new", "torch-xpu": "new"})
            swap.publish(staged, home / "build", replace_all=["torch-rocm"])

    fill()
    for call in killed_at_each_change(publish):
        if not swaps:
            with swap.staging(home / "build"):
                pass
        packages = {name: text for name, text in read(home / "build").items() if not name.startswith(".")}
        assert packages in (OLD, NEW) or (not alone and packages.items() <= OLD.items() | NEW.items()), call
        assert packages.keys() >= OLD.keys() & NEW.keys(), call
        with swap.staging(home / "build"):
            pass
        assert names(home) == ["build"] and not any(name.startswith(".") for name in names(home / "build")), call
        seen.append(packages)
        fill()
    assert (seen[0], seen[-1], read(home / "build")) == (OLD, NEW, NEW)


@pytest.mark.parametrize("inside", [False, True])
def test_files_with_the_name_of_a_leftover_stay(build: Path, inside: bool) -> None:
    """A project may have such a directory; it neither replaces other files nor gets another name."""
    if inside:
        write(build, {".notes.previous": "mine", "notes": "mine", ".words.previous": "mine"})
    else:
        write(build.parent, {".build.previous": "mine"})
    before = names(build), names(build.parent)
    with swap.staging(build):
        pass
    assert (names(build), names(build.parent)) == before
    assert (build / "mine.txt").read_text() == "mine"


def test_the_owner_and_the_mode_of_build_stay(build: Path) -> None:
    """root builds in the directory of another user, as in a container."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (build / "mine.txt").unlink()
    os.chown(build, 1234, 4321)
    build.chmod(0o2775)
    os.setxattr(build, "user.note", b"mine")
    with swap.staging(build) as staged:
        assert staged.parent == build.parent
        write(staged, {"torch-cpu": "new"})
        swap.publish(staged, build, replace_all=[])
    after = build.stat()
    assert (after.st_uid, after.st_gid, after.st_mode & 0o7777) == (1234, 4321, 0o2775)
    assert os.getxattr(build, "user.note") == b"mine"
    assert read(build)["torch-cpu"] == "new"


def test_another_users_build_is_not_swapped(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become this user's, even where the directory around it may be written."""
    (build / "mine.txt").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: build.stat().st_uid + 1)
    with swap.staging(build) as staged:
        assert staged.parent == build


def test_a_file_system_that_cannot_swap(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap takes two steps; if the second fails, the first is undone."""
    # No file system here refuses RENAME_EXCHANGE, but every one refuses a flag that does not exist.
    monkeypatch.setattr(swap, "_RENAME_EXCHANGE", 1 << 20)
    with swap.staging(build) as staged:
        write(staged, {"torch-cpu": "new"})
        swap.publish(staged, build, replace_all=[])
    assert read(build) == {"torch-cpu": "new", "torch-cuda": "old", "torch-rocm": "old"}
    with pytest.raises(FileNotFoundError):
        swap._exchange(build.parent / "nothing", build)
    assert read(build)["torch-cpu"] == "new"
    assert names(build.parent) == ["build"]


def test_one_build_at_a_time_has_a_staging_directory(build: Path) -> None:
    """A second build, with any cache, must not remove the staging directory of the first as a leftover."""
    entered = threading.Event()

    def second() -> None:
        with swap.staging(build):
            entered.set()

    thread = threading.Thread(target=second)
    with swap.staging(build) as staged:
        thread.start()
        assert not entered.wait(0.3)
        assert staged.exists()
    assert entered.wait(10)
    thread.join()
    assert names(build.parent) == ["build"]


def test_metadata_of_other_tools_is_read_as_far_as_possible() -> None:
    assert PackageMetadata.from_json("{}").faults[0] == "has no `id`"
    hostile = {
        "id": 3,
        "name": "demo-kernel",
        "version": True,
        "python-depends": "einops",
        "backend": {"type": "cuda", "archs": ["9.0", 7]},
        "provenance": {"kernel": {"commit": "\x1b[2J", "dirty": 1}, "kernel-builder": []},
    }
    read = PackageMetadata.from_json(json.dumps(hostile))
    assert (read.id, read.name, read.version, read.python_depends) == (None, "demo-kernel", None, ())
    assert (read.backend, read.archs, read.python_name) == ("cuda", ("9.0",), "demo_kernel")
    assert read.faults == (
        "`id` is 3, expected a string",
        "`version` is True, expected an integer",
        "has no `license`",
        "`python-depends` is 'einops', expected a list",
        "has no `digest`",
    )
    assert (read.origin("kernel"), read.origin("kernel-builder"), read.is_dirty) == ({"dirty": True}, {}, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_metadata_that_is_not_a_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackageMetadata.from_json(text)


def test_metadata_is_written_as_it_is_read() -> None:
    written = PackageMetadata(
        id="_demo_cpu_abc",
        name="demo",
        version=1,
        license="MIT",
        python_depends=("einops",),
        kernel_depends=({"repo-id": "you/other", "version": 2},),
        backend="cpu",
        provenance={"kernel-builder": {"version": "1.0"}},
        digest={"algorithm": "sha256", "files": {"a.py": "x"}},
    )
    assert PackageMetadata.from_json(written.to_json()) == written
