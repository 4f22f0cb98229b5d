"""Fixtures of all tests: copies of the sample projects, and empty build caches with the user's toolchains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.files import write_files
from tests.support.places import PROJECTS, SOURCES

if TYPE_CHECKING:
    from tests.support.running_hub import RunningHub


@pytest.fixture
def copy_project(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a project of `tests/projects` to a temporary directory, optionally renamed."""

    def copy(project: str, name: str = "") -> Path:
        target = tmp_path / (name or project)
        shutil.copytree(PROJECTS / project, target, ignore=shutil.ignore_patterns("build"))
        return target

    return copy


@pytest.fixture
def new_cache(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a cache without compiled objects and with the user's downloaded toolchains."""

    from kernel_builder.toolchain import Toolchains

    def make(name: str) -> Path:
        cache = tmp_path / name
        cache.mkdir()
        shared = Toolchains().store.root
        shared.mkdir(parents=True, exist_ok=True)
        (cache / "toolchains").symlink_to(shared, target_is_directory=True)
        return cache

    return make


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[Callable[..., RunningHub]]:
    """A function that starts Hubs: `start_hub("--trust", "org", root=…)`. All are killed after the test."""
    from tests.support.running_hub import running_hub

    with ExitStack() as started:

        def start(*arguments: str, root: Path | None = None, **environment: str) -> RunningHub:
            return started.enter_context(running_hub(tmp_path, *arguments, root=root, **environment))

        yield start


@pytest.fixture
def hub(start_hub: Callable[..., RunningHub]) -> RunningHub:
    """A Hub without tokens that trusts `kernels-community`."""
    return start_hub("--trust", "kernels-community")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser, started by Playwright, whose event loop allows no other one meanwhile."""
    playwright = pytest.importorskip("playwright.sync_api")
    installed = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: apt install chromium, or playwright install chromium ({str(error)[:100]})")
        yield browser
        browser.close()


@pytest.fixture
def judge_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new cache the builder's: its device locks are apart from those of other tests."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(cache))
    return cache


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """Return a task in the form of KernelBench."""
    return write_files(tmp_path / "level1", {"7_Linear.py": SOURCES["problem"]}) / "7_Linear.py"
