"""The commands that maintain the store: verify, list, clean, fetch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains

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
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 1000)
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
