"""How packages take the place of older ones, and what is done about builds that were killed meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kernel_builder.errors import PackageError
from kernel_builder.package import assembly


def write(directory: Path, **packages: str) -> None:
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
    write(destination, one="old", two="old", three="old")
    (destination / "mine.txt").write_text("mine")
    return destination


def test_all_packages_change_in_one_step(build: Path) -> None:
    """Someone who has the old directory open goes on seeing all of the old packages."""
    before = os.open(build, os.O_RDONLY)
    with assembly.staging(build) as staged:
        write(staged, one="new", four="new")
        seen = Path(f"/proc/self/fd/{before}")
        assert read(build) == {"one": "old", "two": "old", "three": "old"}
        assembly.publish(staged, build, replace_all=["three"])
        assert read(build) == {"one": "new", "two": "old", "four": "new"}
        assert read(seen) == {"one": "old", "two": "old", "three": "old"}
    os.close(before)
    assert (build / "mine.txt").read_text() == "mine"
    assert names(build.parent) == ["build"]


def test_a_directory_that_someone_is_in_stays(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(build)
    with assembly.staging(build) as staged:
        write(staged, one="new", four="new")
        assembly.publish(staged, build, replace_all=["three"])
    assert read(Path()) == {"one": "new", "two": "old", "four": "new"}
    assert names(Path()) == ["four", "mine.txt", "one", "two"]


def test_what_fails_changes_nothing(build: Path) -> None:
    with pytest.raises(PackageError) as caught, assembly.staging(build) as staged:
        write(staged, one="new")
        raise OSError(28, "No space left on device", str(staged / "one"))
    assert "No space left on device" in caught.value.message
    assert read(build) == {"one": "old", "two": "old", "three": "old"}
    assert names(build.parent) == ["build"]


@pytest.mark.parametrize("inside", [False, True])
def test_what_killed_builds_left_is_taken_back(build: Path, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """Between the two halves of a swap on a file system that cannot do it in one, and before or after."""
    if inside:
        monkeypatch.chdir(build)
        home, cut_off = build, build / "two"
        write(home, **{f".{build.name}.staging-killed": "half"})
        write(home, **{".one.previous": "old"})
        (build / "one" / "metadata.json").write_text("half")
    else:
        home, cut_off = build.parent, build
        write(home, **{f".{build.name}.staging-killed": "half", ".other.previous": "not ours"})
    cut_off.rename(cut_off.with_name(f".{cut_off.name}.previous"))
    with assembly.staging(build) as staged:
        assert names(staged) == []
        assert read(build) == {"one": "old", "two": "old", "three": "old"}
    assert names(build) == ["mine.txt", "one", "three", "two"]
    assert names(build.parent) == (["build"] if inside else [".other.previous", "build"])


def test_a_file_system_that_cannot_swap(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps; if the second one fails, the first is undone."""
    # No file system here refuses RENAME_EXCHANGE, but every one refuses a flag that does not exist.
    monkeypatch.setattr(assembly, "_RENAME_EXCHANGE", 1 << 20)
    with assembly.staging(build) as staged:
        write(staged, one="new")
        assembly.publish(staged, build, replace_all=[])
    assert read(build) == {"one": "new", "two": "old", "three": "old"}
    with pytest.raises(FileNotFoundError):
        assembly._exchange(build.parent / "nothing", build)
    assert read(build)["one"] == "new"
    assert names(build.parent) == ["build"]


def test_one_build_at_a_time_has_a_staging_directory(build: Path) -> None:
    """Whatever locks their caches have: a second build must not take the first one's for a left-over."""
    entered = threading.Event()

    def second() -> None:
        with assembly.staging(build):
            entered.set()

    thread = threading.Thread(target=second)
    with assembly.staging(build) as staged:
        thread.start()
        assert not entered.wait(0.3)
        assert staged.exists()
    assert entered.wait(10)
    thread.join()
