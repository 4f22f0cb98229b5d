"""Fixtures: a synthetic index on a loopback port, its lock, and toolchains and commands that use both."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_builder.config.variant import Release
from kernel_builder.progress import Silent
from kernel_builder.toolchain import Toolchains, lock
from kernel_builder.toolchain.dependencies import Dependency, DependencyFile
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import ToPin, resolve

from .index_server import IndexServer, build_wheels

COMMAND = [sys.executable, "-c", "from kernel_builder.cli import main; main()"]

_BOTH = ("include/", "tools/util/include/")
LIBRARIES = (
    Dependency("cutlass_2_10", "2.10.0", "MIT", ()),
    Dependency(
        "cutlass_3_8", "3.8.0", "MIT", (DependencyFile("headers-3.8.0-py3-none-any.whl", "headers/source/", _BOTH),)
    ),
    Dependency(
        "cutlass_4_0",
        "4.0.0",
        "MIT",
        (
            DependencyFile("kernels-2.0.tar.gz", "kernels-2.0/deps/", ("include/",)),
            DependencyFile("other_kernels-1.0.tar.gz", "other_kernels-1.0/3rdparty/", ("tools/util/include/",)),
        ),
    ),
)


@pytest.fixture(scope="session")
def wheel_files() -> dict[str, bytes]:
    return build_wheels()


@pytest.fixture(scope="session")
def pinned(wheel_files: dict[str, bytes]) -> lock.Lock:
    """The lock that the real code writes for the synthetic index."""
    with IndexServer(dict(wheel_files)) as server:
        return resolve(
            Index(server.url), ToPin(torch=[Release(2, 10)], cuda=[Release(13, 0)], libraries=LIBRARIES), Silent()
        )


@pytest.fixture
def server(wheel_files: dict[str, bytes]) -> Iterator[IndexServer]:
    with IndexServer(dict(wheel_files)) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def toolchains(
    server: IndexServer, cache: Path, pinned: lock.Lock, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Toolchains]:
    """Return a function that makes Toolchains on the synthetic index; each call stands for a new process."""
    monkeypatch.delenv("CUDA_HOME", raising=False)

    def make(**settings: object) -> Toolchains:
        arguments: dict[str, object] = {"cache": cache, "pinned": pinned, "index_url": server.url}
        return Toolchains(**{**arguments, **settings})  # type: ignore[arg-type]

    return make


@pytest.fixture
def start(
    server: IndexServer, cache: Path, pinned: lock.Lock, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts `kernel-builder toolchain ...`. Processes that still run at the end are killed."""
    lock_file = tmp_path / "lock.json"
    lock_file.write_text(lock.dumps(pinned))
    running: list[subprocess.Popen[str]] = []

    def run(
        *arguments: str, fetch: bool = True, environment: dict[str, str] | None = None, **settings: object
    ) -> subprocess.Popen[str]:
        options = ["--lock", str(lock_file), "--index-url", server.url] if fetch else []
        process = subprocess.Popen(
            [*COMMAND, "toolchain", *arguments, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KERNEL_BUILDER_CACHE": str(cache), **(environment or {})},
            **settings,  # type: ignore[call-overload]
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def unpacked(wheel_files: dict[str, bytes]) -> Callable[[str], dict[str, bytes]]:
    """Return a function that reads the files of a synthetic wheel with the standard library."""
    import zipfile

    def read(name: str) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(wheel_files[name])) as archive:
            return {member: archive.read(member) for member in archive.namelist()}

    return read
