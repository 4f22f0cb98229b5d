"""The commands that maintain the store: verify, list, clean, fetch."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains

Start = Callable[..., "subprocess.Popen[str]"]


def test_verify_finds_altered_missing_and_added_files_and_removes_the_tree(
    toolchains: Callable[..., Toolchains], start: Start
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
    assert start("verify", "--remove").wait() == 0
    assert not root.exists()
    assert toolkits.toolkit(toolchains(), Release(13, 0)).root == root
    assert start("verify").wait() == 0


def test_list_shows_stored_and_pinned_sizes(
    toolchains: Callable[..., Toolchains], start: Start, tmp_path: Path
) -> None:
    toolchains().torch(Release(2, 10), "stable")
    process = start("list")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    (cuda,) = (line for line in output.splitlines() if line.startswith("cuda-13.0 "))
    (torch,) = (line for line in output.splitlines() if line.startswith("torch-2.10-stable "))
    assert re.search(r" [4-9]\.\d MB to download +not in the store$", cuda)
    assert torch.endswith("in the store, 0.0 MB")


def test_clean_removes_unused_trees_and_interrupted_downloads(
    toolchains: Callable[..., Toolchains], start: Start, cache: Path
) -> None:
    tools = toolchains()
    old, recent = tools.torch(Release(2, 10), "full").include[0], tools.torch(Release(2, 10), "stable").include[0]
    ten_days_ago = time.time() - 10 * 86400
    os.utime(old.parent, (ten_days_ago, ten_days_ago))
    half = cache / "toolchains/scratch/cuda-x/half.part"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 1000)
    assert start("clean", "--older-than", "5").wait() == 0
    assert not old.exists()
    assert recent.exists()
    assert not half.exists()
    assert start("clean", "--all").wait() == 0
    assert not list(cache.glob("toolchains/trees/*"))


def test_fetching_an_unpinned_release_lists_the_pinned_ones(start: Start) -> None:
    process = start("fetch", "cuda-12.6")
    _, errors = process.communicate()
    assert process.returncode == 4
    assert "cuda-12.6" in errors
    assert "cuda-13.0" in errors
