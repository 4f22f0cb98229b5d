"""A failure means that a process that is killed while it makes or removes a tree leaves more or less than it may."""

from __future__ import annotations

import os
from pathlib import Path

from kernel_builder.progress import Silent
from kernel_builder.toolchain.store import Store
from tests.support.kills import killed_at_each_change


def _make(scratch: Path, directory: Path) -> None:
    download = scratch / "download"
    if not download.exists():
        download.write_text("content")
    (directory / "bin").mkdir()
    (directory / "bin" / "tool").write_text(download.read_text())


def _present(root: Path) -> set[str]:
    """Return the store's entries besides its locks."""
    return {str(path.relative_to(root)) for path in root.rglob("*")} - {"locks", "locks/tree", "trees", "scratch"}


WHOLE = {"trees/tree", *(f"trees/tree/{name}" for name in ("manifest.json", "tree", "tree/bin", "tree/bin/tool"))}


def test_a_tree_is_whole_and_alone_whenever_its_maker_is_killed(tmp_path: Path) -> None:
    killed = 0

    def obtain() -> None:
        Store(tmp_path / str(killed), Silent()).obtain("tree", "a tree", _make)

    for call in killed_at_each_change(obtain):
        root = tmp_path / str(killed)
        store = Store(root, Silent())
        assert not store.trees() or _present(root) == WHOLE, call
        tree = store.obtain("tree", "a tree", _make)
        assert (tree / "bin" / "tool").read_text() == "content" and not list(store.damages("tree")), call
        assert _present(root) == WHOLE, call
        killed += 1
    assert killed > 10


def test_a_tree_is_whole_or_gone_whenever_its_remover_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(root, Silent())

    def remove() -> None:
        store.obtain("tree", "a tree", _make)
        store.clear()

    for call in killed_at_each_change(remove):
        assert not store.trees() or _present(root) == WHOLE, call
    assert _present(root) == set()


def test_trees_of_an_earlier_time_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, Silent())
    for name in ("earlier", "later"):
        store.obtain(name, name, _make)
    os.utime(tmp_path / "trees/earlier", (100, 100))
    store.clear(before=200)
    assert list(store.trees()) == ["later"]
