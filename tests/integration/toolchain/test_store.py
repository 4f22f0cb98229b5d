"""The commands that maintain the store: verify, list, clean, fetch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains

Start = Callable[..., "subprocess.Popen[str]"]


def test_verify_finds_altered_missing_and_added_files(toolchains: Callable[..., Toolchains], start: Start) -> None:
    root = toolkits.toolkit(toolchains(), Release(13, 0)).root
    altered, missing, added = root / "bin/ptxas", root / "include/cuda_runtime.h", root / "include/new.h"
    altered.chmod(0o755)
    altered.write_bytes(altered.read_bytes()[:-1] + b"!")
    missing.unlink()
    added.write_text("")
    process = start("verify", "--json")
    output, _ = process.communicate()
    assert process.returncode == 4
    assert {damage["path"] for damage in json.loads(output)["damages"]} == {str(altered), str(missing), str(added)}
    assert start("clean").wait() == 0
    assert not root.exists()
    assert toolkits.toolkit(toolchains(), Release(13, 0)).root == root
    assert start("verify").wait() == 0


def test_list_shows_stored_and_pinned_sizes(
    toolchains: Callable[..., Toolchains], start: Start, tmp_path: Path
) -> None:
    toolchains().torch(Release(2, 10), "stable")
    process = start("list", "--json")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    rows = {row["title"]: row for row in json.loads(output)["toolchains"]}
    assert rows["CUDA 13.0"]["stored"] is None
    assert rows["CUDA 13.0"]["download"] > 4_000_000
    assert 0 < rows["Torch 2.10 headers (stable)"]["stored"] < 1000


def test_clean_removes_trees_and_interrupted_downloads(
    toolchains: Callable[..., Toolchains], start: Start, cache: Path
) -> None:
    toolchains().torch(Release(2, 10), "stable")
    half = cache / "toolchains/scratch/cuda-x/half.part"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 1000)
    process = start("clean", "--json")
    output, _ = process.communicate()
    assert json.loads(output)["freed"] > 1000
    assert not list(cache.glob("toolchains/trees/*")) and not half.exists()


def test_fetch_prints_json(start: Start, server: object) -> None:
    for downloaded in (True, False):
        process = start("fetch", "torch-2.10-stable", "--json")
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        (row,) = json.loads(output)
        assert (row["downloaded"] > 0) is downloaded
        assert Path(row["path"]).is_dir()


def test_fetching_an_unpinned_release_lists_the_pinned_ones(start: Start) -> None:
    process = start("fetch", "cuda-12.6")
    _, errors = process.communicate()
    assert process.returncode == 4
    assert "cuda-12.6" in errors
    assert "cuda-13.0" in errors
