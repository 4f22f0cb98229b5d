"""The web pages, without JavaScript."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import requests
from raw_requests import commit

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel

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


def test_pages_of_a_kernel(hub: RunningHub, tmp_path: Path) -> None:
    folder = write_kernel(tmp_path / "kernel")
    stable = folder / "build" / "torch-stable-abi210-cu130-x86_64-linux"
    stable.mkdir()
    metadata = {"backend": {"type": "cuda", "archs": ["9.0a", "12.0+PTX"]}}
    (stable / "metadata.json").write_text(json.dumps(metadata))
    for branch in ("v1", "v2"):
        publish_kernel(hub, folder, branch=branch)
    for path, text in {"README.md": CARD, "benchmarks/results/speed.svg": PLOT}.items():
        commit(hub.api(), KERNEL, path, text.encode())

    first = requests.get(hub.url).text
    assert "Doubles a tensor." in first and f'href="/kernels/{KERNEL}"' in first
    for query, version in (("", 2), ("?version=v1", 1)):
        answer = requests.get(f"{hub.url}/kernels/{KERNEL}{query}")
        page = unescape(answer.text)
        assert f'twice = kernels.get_kernel("{KERNEL}", version={version})' in page
    assert page.index("Doubles a tensor.") < page.index("torch-stable-abi210-")
    row = re.sub(r"<[^>]*>", "|", page[page.index("torch-stable-abi210-") :])
    cells = [cell.strip() for cell in row.split("|") if cell.strip()]
    assert cells[1:5] == ["2.10 and later", "CUDA 13.0 to 13.x", "x86_64-linux", "9.0a, 12.0+PTX"]
    plot = f"/kernels/{KERNEL}/resolve/main/benchmarks/results/speed.svg"
    assert re.search(f'<img[^>]* src="{plot}"', page) and requests.get(f"{hub.url}{plot}").text == PLOT
    # Neither scripts nor other hosts: the card names both.
    assert "203.0.113.1" not in page and "<script" not in page and "onerror" not in page
    assert "img-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "<td><code>twice(x)</code></td>" in page


def test_relative_addresses_in_a_card(hub: RunningHub) -> None:
    card = (
        '[a](docs/x.md) <a href="y.md">y</a> ![i](../../i.png) ![o](https://elsewhere/o) <img src="//[x"> [b](http://[)'
    )
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    commit(api, KERNEL, "README.md", card.encode())
    page = requests.get(f"{hub.url}/kernels/{KERNEL}").text
    files = f"/kernels/{KERNEL}/resolve/main"
    for shown in (f'href="{files}/docs/x.md"', f'href="{files}/y.md"', f'src="{files}/i.png"'):
        assert shown in page
    assert "elsewhere" not in page and "[x" not in page
    assert "Traceback" not in hub.log.read_text()
