"""The commands that maintain the store: verify, list, clean, fetch. Trees are whole whenever a process is killed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain import Toolchains
from kernel_builder.toolchain.store import Store
from kernel_format.errors import StoreError
from tests.support.files import write_files
from tests.support.kills import killed_at_each_change

Start = Callable[..., "subprocess.Popen[str]"]


def test_verify_finds_damaged_files_and_clean_removes_all(
    toolchains: Callable[..., Toolchains], start: Start, cache: Path
) -> None:
    root = toolkits.toolkit(toolchains(), Release(13, 0)).root
    altered, missing, added = root / "bin/ptxas", root / "include/cuda_runtime.h", root / "include/new.h"
    altered.chmod(0o755)
    altered.write_bytes(altered.read_bytes()[:-1] + b"!")
    missing.unlink()
    added.write_text("")
    process = start("verify")
    output, _ = process.communicate()
    assert process.returncode == 4
    assert all(f"{path} " in output for path in (altered, missing, added)) and "3 files damaged" in output
    half = cache / "toolchains/scratch/cuda-x/half.part"
    write_files(half.parent, {half.name: "x" * 1000})
    assert start("clean").wait() == 0
    assert not root.exists() and not half.exists()
    assert toolkits.toolkit(toolchains(), Release(13, 0)).root == root
    assert start("verify").wait() == 0


def test_list_shows_sizes_and_an_unpinned_release_is_refused(
    toolchains: Callable[..., Toolchains], start: Start
) -> None:
    toolchains().torch(Release(2, 10), "stable")
    process = start("list")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    (cuda,) = (line for line in output.splitlines() if line.startswith("cuda-13.0 "))
    (torch,) = (line for line in output.splitlines() if line.startswith("torch-2.10-stable "))
    assert re.search(r" [4-9]\.\d MB to download +not in the store$", cuda)
    assert torch.endswith("in the store, 0.0 MB")
    process = start("fetch", "cuda-12.6")
    _, errors = process.communicate()
    assert process.returncode == 4 and "cuda-12.6" in errors and "cuda-13.0" in errors, "those that are pinned"


def make_tree(scratch: Path, directory: Path) -> None:
    download = scratch / "download"
    if not download.exists():
        download.write_text("content")
    write_files(directory, {"bin/tool": download.read_text()})


def present(root: Path) -> set[str]:
    """Return what is in the store besides its locks."""
    return {str(path.relative_to(root)) for path in root.rglob("*")} - {"locks", "locks/tree", "trees", "scratch"}


WHOLE = {"trees/tree", *(f"trees/tree/{name}" for name in ("manifest.json", "tree", "tree/bin", "tree/bin/tool"))}


def test_a_tree_is_whole_and_alone_whenever_its_maker_is_killed(tmp_path: Path) -> None:
    killed = 0

    def obtain() -> None:
        Store(tmp_path / str(killed), Progress()).obtain("tree", "a tree", make_tree)

    for call in killed_at_each_change(obtain):
        root = tmp_path / str(killed)
        store = Store(root, Progress())
        assert not store.trees() or present(root) == WHOLE, call
        tree = store.obtain("tree", "a tree", make_tree)
        assert (tree / "bin" / "tool").read_text() == "content" and not list(store.damages("tree")), call
        assert present(root) == WHOLE, call
        killed += 1
    assert killed > 10


def test_a_tree_is_whole_or_gone_whenever_its_remover_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = Store(root, Progress())

    def remove() -> None:
        store.obtain("tree", "a tree", make_tree)
        store.clear()

    for call in killed_at_each_change(remove):
        assert not store.trees() or present(root) == WHOLE, call
    assert present(root) == set()


def test_trees_of_an_earlier_time_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, Progress())
    for name in ("earlier", "later"):
        store.obtain(name, name, make_tree)
    os.utime(tmp_path / "trees/earlier", (100, 100))
    store.clear(before=200)
    assert list(store.trees()) == ["later"]
    write_files(tmp_path, {"trees/later/manifest.json": '{"title": "nv'})
    with pytest.raises(StoreError, match=r"later/manifest.json: a file of the toolchain store cannot be read"):
        store.trees()
