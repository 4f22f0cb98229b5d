"""The web pages, in a real browser, without JavaScript."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, write_kernel

playwright = pytest.importorskip("playwright.sync_api")

CARD = """---
license: apache-2.0
---
# twice

Doubles a tensor. <script>document.title = "owned"</script><img src=x onerror="document.title='owned'">

| function | result |
| --- | --- |
| `twice(x)` | `x * 2` |

![speed](benchmarks/results/speed.svg) ![outside](http://203.0.113.1/track.png) [the plot](benchmarks/results/speed.svg)
[click](javascript:alert(1))
"""
PLOT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="120" height="40"><rect width="120" height="40" fill="teal"/></svg>'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    installed = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as runs:
        try:
            opened = runs.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: apt install chromium, or playwright install chromium ({str(error)[:100]})")
        yield opened
        opened.close()


def publish(hub: RunningHub, directory: Path, token: str = "any") -> None:
    write_kernel(directory)
    stable = directory / "build" / "torch-stable-abi210-cu130-x86_64-linux"
    stable.mkdir()
    metadata = {"backend": {"type": "cuda", "archs": ["9.0a", "12.0+PTX"]}}
    (stable / "metadata.json").write_text(json.dumps(metadata))
    api = hub.api(token)
    api.create_repo(KERNEL, repo_type="kernel", private=token != "any")
    results = directory / "sources" / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "speed.svg").write_text(PLOT)
    (directory / "sources" / "README.md").write_text(CARD)
    api.upload_folder(repo_id=KERNEL, folder_path=directory / "sources", repo_type="kernel")
    for branch in ("v1", "v2"):
        api.create_branch(KERNEL, branch=branch, repo_type="kernel")
        api.upload_folder(
            repo_id=KERNEL, folder_path=directory, repo_type="kernel", revision=branch, allow_patterns="build/*"
        )


def test_pages_of_a_kernel(hub: RunningHub, browser: object, tmp_path: Path) -> None:
    publish(hub, tmp_path / "kernel")
    requested: list[str] = []
    page = browser.new_context(java_script_enabled=False).new_page()  # type: ignore[attr-defined]
    page.on("request", lambda request: requested.append(request.url))
    page.goto(hub.url)
    assert "Doubles a tensor." in page.inner_text("main")
    page.click(f"text={KERNEL}")
    assert page.inner_text("#load") == f'twice = kernels.get_kernel("{KERNEL}", version=2)'
    text = page.inner_text("main")
    assert text.index("Doubles a tensor.") < text.index("torch-stable-abi210-")
    page.click("nav >> text=v1")
    assert page.inner_text("#load") == f'twice = kernels.get_kernel("{KERNEL}", version=1)'
    row = page.locator("#variants tbody tr >> nth=1 >> td").all_inner_texts()
    assert row[0] == "torch-stable-abi210-cu130-x86_64-linux"
    assert row[1:5] == ["2.10 and later", "CUDA 13.0 to 13.x", "x86_64-linux", "9.0a, 12.0+PTX"]
    shown = page.evaluate("[...document.images].map(image => [new URL(image.src).pathname, image.naturalWidth])")
    assert [f"/kernels/{KERNEL}/resolve/main/benchmarks/results/speed.svg", 120] in shown
    assert page.inner_text("article td >> nth=0") == "twice(x)"
    assert all(url.startswith(hub.url) for url in requested)


def test_relative_addresses_in_a_card(hub: RunningHub) -> None:
    card = (
        '[a](docs/x.md) <a href="y.md">y</a> ![i](../../i.png) ![o](https://elsewhere/o) <img src="//[x"> [b](http://[)'
    )
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    api.create_commit(
        KERNEL, [CommitOperationAdd("README.md", card.encode())], commit_message="card", repo_type="kernel"
    )
    page = requests.get(f"{hub.url}/kernels/{KERNEL}").text
    files = f"/kernels/{KERNEL}/resolve/main"
    for shown in (f'href="{files}/docs/x.md"', f'href="{files}/y.md"', f'src="{files}/i.png"'):
        assert shown in page
    assert "elsewhere" not in page and "[x" not in page
    assert "Traceback" not in hub.log.read_text()
