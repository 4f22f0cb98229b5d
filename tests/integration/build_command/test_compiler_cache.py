"""A compiler cache (sccache) in addition to the builder's own cache."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    Copy,
    NewCache,
    Run,
    content,
)
from tests.support.places import CPU, CUDA


def test_a_compiler_cache_gives_the_same_bytes(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    sccache = Path(sys.executable).with_name("sccache")
    server = {"SCCACHE_DIR": str(tmp_path / "sccache"), "SCCACHE_SERVER_PORT": "4327"}
    project = copy_project("stable-scale")
    plain, cached = new_cache("plain"), new_cache("cached")
    # Sources of g++ and nvcc; no compiler cache knows the clang of CUDA 12.
    build = ("build", project, "--variant", CUDA, "--cuda-compiler", "nvcc", "--no-load")

    def counts() -> dict[str, int]:
        command = [sccache, "--show-stats", "--stats-format", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, **server})
        stats = json.loads(done.stdout)["stats"]
        totals = {name: sum(stats[name]["counts"].values()) for name in ("cache_hits", "cache_misses")}
        return {**totals, "requests_executed": stats["requests_executed"]}

    try:
        for cache, out, choice in ((plain, "plain-out", "off"), (cached, "cached-out", str(sccache))):
            done = kernel_builder(cache, *build, "--out", project / out, "--compiler-cache", choice, **server)
            assert done.code == 0, done
        before = counts()
        for made in ("objects", "binaries"):
            shutil.rmtree(cached / made)
        done = kernel_builder(cached, *build, "--out", project / "warm-out", "--compiler-cache", sccache, **server)
        assert done.code == 0, done
        after = counts()
    finally:
        subprocess.run([sccache, "--stop-server"], capture_output=True, check=False, env={**os.environ, **server})
    assert before["requests_executed"] > 0
    # After the builder's cache is emptied, every object comes from the compiler cache.
    assert after["cache_hits"] > before["cache_hits"]
    assert after["cache_misses"] == before["cache_misses"]
    assert content(project / "plain-out") == content(project / "cached-out") == content(project / "warm-out")


def test_no_server_runs_when_a_package_is_loaded(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    """A server runs whatever compiler it is told to: a package that reached one would run commands as the user."""
    storage, seen = tmp_path / "sccache", tmp_path / "seen"
    storage.mkdir()
    (tmp_path / "tmp").mkdir()
    project = copy_project("stable-scale")
    with (project / "torch-ext" / "stable_scale" / "__init__.py").open("a") as init:
        init.write(
            "\nfrom pathlib import Path\n"
            "names = {path.parent: path.read_text().strip() for path in Path('/proc').glob('[0-9]*/comm')}\n"
            "servers = [place for place, name in names.items() if name == 'sccache']\n"
            f"mine = [place for place in servers if {os.fsencode(storage)!r} in (place / 'environ').read_bytes()]\n"
            f"Path({str(seen)!r}).write_text(str(mine) + str(list(Path({str(storage)!r}).rglob('*.sock'))))\n"
        )
    sccache = Path(sys.executable).with_name("sccache")
    arguments = ("build", project, "--variant", CPU, "--sandbox", "off", "--compiler-cache", sccache)
    places = {"SCCACHE_DIR": str(storage), "TMPDIR": str(tmp_path / "tmp")}
    with socket.socket() as another_users:
        another_users.settimeout(0)
        with contextlib.suppress(OSError):  # somebody's server has the default port
            another_users.bind(("127.0.0.1", 4226))
            another_users.listen()
        done = kernel_builder(new_cache("cache"), *arguments, **places)
        with pytest.raises(OSError):
            another_users.accept()
    assert done.code == 0, done
    assert seen.read_text() == "[][]"
    assert any(storage.rglob("*/*/*")) and not list((tmp_path / "tmp").iterdir())
