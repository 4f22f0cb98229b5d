"""Fixtures: a synthetic index on a loopback port, its lock, and toolchains and commands that use both."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.config.variant import Release
from kernel_builder.progress import Progress
from kernel_builder.toolchain import Toolchains, lock
from kernel_builder.toolchain.components import in_table, of_torch
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import resolve
from tests.support.places import SOURCES

from .index_server import IndexServer, build_wheels

TABLES = Path(__file__).with_name("tables")
HEADER_LIBRARIES = tuple(in_table(toml_file.read(TABLES / "header_libraries.toml")))
COMPONENTS = (*of_torch([Release(2, 10)]), *in_table(toml_file.read(TABLES / "cuda.toml")), *HEADER_LIBRARIES)


@pytest.fixture(scope="session")
def wheel_files() -> dict[str, bytes]:
    return build_wheels()


@pytest.fixture(scope="session")
def pinned(wheel_files: dict[str, bytes]) -> lock.Lock:
    """The lock that the real code writes for the synthetic index."""
    with IndexServer(dict(wheel_files)) as server:
        return resolve(Index(server.url), COMPONENTS, Progress())


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
    command = [sys.executable, "-c", SOURCES["with_another_lock"], str(lock_file)]
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: str, environment: dict[str, str] | None = None, **settings: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, "toolchain", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "PIP_INDEX_URL": server.url, **(environment or {})},
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

    def read(name: str) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(wheel_files[name])) as archive:
            return {member: archive.read(member) for member in archive.namelist()}

    return read
