"""Files and temporary directories are whole, whatever is put into them and however their processes end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kernel_format import files
from kernel_format.files import replaced_directory, replacing, take_name, temporary_directory, write_files
from tests.support.kills import killed_at_each_change
from tests.support.places import SOURCES


@pytest.mark.parametrize("before", [None, "old"])
def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "file"
    if before:
        path.write_text(before)
    done = subprocess.run([sys.executable, "-c", SOURCES["is_killed_while_it_writes"], path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == ({"file": before} if before else {})
    with replacing(path, mode=0o640) as file:
        file.write(b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)


def test_errors_name_the_destination(tmp_path: Path) -> None:
    for path, limit in ((tmp_path / "no/file", 99), (tmp_path / "file", 9)):
        with pytest.raises(OSError, match=r"No such|too large") as caught, files.size_limit(limit):
            files.write_atomically(path, "more than nine bytes")
        assert caught.value.filename == str(path)


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of running processes, of other programs and those that a link leads to stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "kernel-builder-other").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "kernel-builder-tmp-link").symlink_to(tmp_path / "linked")
    processes = [
        subprocess.Popen([sys.executable, "-c", SOURCES["keeps_a_directory"]], stdout=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    try:
        left, kept = (Path(process.stdout.readline().strip()) for process in processes if process.stdout)
        processes[0].kill()
        processes[0].wait()
        assert left.exists()
        files._remove_abandoned.cache_clear()
        with temporary_directory() as mine:
            assert not left.exists() and (kept / "file").exists() and mine.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [kept.name, "kernel-builder-other", "kernel-builder-tmp-link", "linked"]
        )
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_a_directory_has_its_name_at_every_moment_of_its_replacement(tmp_path: Path) -> None:
    place = tmp_path / "place"

    def replace() -> None:
        with replaced_directory(place) as new:
            (new / "text").write_text("new")

    write_files(place, {"text": "old"})
    seen = [(place / "text").read_text() for _ in killed_at_each_change(replace)]
    assert {"old", "new"} == {*seen, (place / "text").read_text()}
    with pytest.raises(FileNotFoundError):
        take_name(tmp_path / "missing", place)
    assert (place / "text").read_text() == "new"
