"""The web pages, in a real browser, without JavaScript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import requests
from raw_requests import TokenHub, commit

from kernel_format.tree_digest import SIGNATURE
from tests.support.files import write_files
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, write_kernel

CARD = Path(__file__).with_name("page_card.txt").read_text()
PLOT = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="120" height="40"><rect width="120" height="40" fill="teal"/></svg>'
)


def publish(hub: RunningHub, directory: Path, token: str = "any") -> None:
    write_kernel(directory)
    metadata = json.dumps({"backend": {"type": "cuda", "archs": ["9.0a", "12.0+PTX"]}})
    stable = directory / "build" / "torch-stable-abi210-cu130-x86_64-linux"
    write_files(stable, {"metadata.json": metadata, SIGNATURE: "{}"})
    write_files(directory / "sources", {"benchmarks/results/speed.svg": PLOT, "README.md": CARD})
    api = hub.api(token)
    api.create_repo(KERNEL, repo_type="kernel", private=token != "any")
    api.upload_folder(repo_id=KERNEL, folder_path=directory / "sources", repo_type="kernel")
    for branch in ("v1", "v2"):
        api.create_branch(KERNEL, branch=branch, repo_type="kernel")
        api.upload_folder(
            repo_id=KERNEL, folder_path=directory, repo_type="kernel", revision=branch, allow_patterns="build/*"
        )


def test_pages_of_a_kernel(hub: RunningHub, browser: Any, tmp_path: Path) -> None:
    publish(hub, tmp_path / "kernel")
    requested: list[str] = []
    page = browser.new_context(java_script_enabled=False).new_page()
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
    assert row[1:6] == ["2.10 and later", "CUDA 13.0 to 13.x", "x86_64-linux", "9.0a, 12.0+PTX", "signed"]
    text = page.inner_text("main")
    assert text.count("Doubles a tensor.") == 1 and "a second" not in text
    assert {"API", "Build"} <= set(page.locator("article h2").all_inner_texts())
    page.click("details summary")
    files = page.locator("#files li").all_inner_texts()
    assert f"build/{VARIANT}/table.bin 1.2 MiB" in files
    response = page.request.get(hub.url + page.get_attribute("#files a >> text=table.bin", "href"))
    assert response.ok and len(response.body()) == 1_280_000
    page.set_viewport_size({"width": 375, "height": 700})
    newest = page.locator("ul:last-of-type a >> nth=0").get_attribute("href")
    for address in (page.url, hub.url, hub.url + newest):
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, address
        assert page.evaluate("[...document.querySelectorAll('th, .badge')].every(e => e.offsetHeight < 40)"), "one line"
    page.goto(f"{hub.url}/kernels/{KERNEL}")
    shown = page.evaluate("[...document.images].map(image => [new URL(image.src).pathname, image.naturalWidth])")
    assert [f"/kernels/{KERNEL}/resolve/main/benchmarks/results/speed.svg", 120] in shown
    assert page.inner_text("article td >> nth=0") == "twice(x)"
    assert all(url.startswith(hub.url) for url in requested)
    organization = KERNEL.split("/")[0]
    page.click(f"h1 >> text={organization}")
    assert page.url == f"{hub.url}/{organization}" and KERNEL in page.inner_text("main")
    assert page.goto(f"{hub.url}/none").status == 404


def test_a_user_logs_in_and_out(token_hub: TokenHub, browser: Any) -> None:
    hub, token = token_hub(desk={"read": ("a",)})
    known = {"username": "any", "password": token}
    page = browser.new_context(java_script_enabled=False, http_credentials=known).new_page()
    page.goto(hub.url)
    page.click("text=Log in")
    assert page.inner_text("#user") == "desk"
    assert page.goto(f"{hub.url}/logout").status == 401


def test_relative_addresses_in_a_card(hub: RunningHub) -> None:
    card = (
        "[a](docs/x.md) [y](y.md) ![i](../../i.png) ![o](https://elsewhere/o) ![](//[x) [b](http://[)"
        " ![](%2e%2e/%2e%2e/logout?a=b%26c#d) ![](..%5c..%5c..%5clogout2) ![](%252e%252e/x) <<i>b onclick=x>c</b>"
    )
    hub.api().create_repo(KERNEL, repo_type="kernel")
    commit(hub.api(), KERNEL, "README.md", card.encode())
    page = requests.get(f"{hub.url}/kernels/{KERNEL}").text
    files = f"/kernels/{KERNEL}/resolve/main"
    for shown in (f'href="{files}/docs/x.md"', f'href="{files}/y.md"', f'src="{files}/i.png"'):
        assert shown in page
    for shown in ("logout?a=b%26c#d", "logout2", "%252e%252e/x"):
        assert f'src="{files}/{shown}"' in page
    assert "elsewhere" not in page and 'src="//[x' not in page and "onclick" not in page
    assert "Traceback" not in hub.log.read_text()
