"""The files of deploy/: checked by their own programs where there are such, and nginx in front of a real Hub."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from huggingface_hub import HfApi
from raw_requests import commit

from tests.support.running_hub import RunningHub

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_nginx_hands_on_large_bodies_and_encoded_slashes(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    hub = start_hub("--trust", "a", FORWARDED_ALLOW_IPS="127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    site = (DEPLOY / "nginx.conf").read_text()
    for name, value in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
        ("    ssl_certificate /etc/ssl/hub.example.org.pem;\n", ""),
        ("    ssl_certificate_key /etc/ssl/hub.example.org.key;\n", ""),
        ("http://127.0.0.1:8000", hub.url),
    ):
        assert name in site
        site = site.replace(name, value)
    folders = " ".join(
        f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\ndaemon off;\nmaster_process off;\nerror_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; {folders}\n{site}\n}}\n"
    )
    command = [nginx, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 10
            while time.monotonic() < until:
                try:
                    assert requests.get(f"{url}/health").ok
                    break
                except requests.ConnectionError:
                    time.sleep(0.05)
            api = HfApi(endpoint=url, token="any")
            api.create_repo("a/one", repo_type="kernel")
            content = os.urandom(3_000_000)  # above nginx's own limit of 1 MB
            made = commit(api, "a/one", "x.bin", content, create_pr=True)
            assert made.pr_url.startswith(url)
            path = api.hf_hub_download(
                "a/one", "x.bin", repo_type="kernel", revision="refs/pr/1", cache_dir=tmp_path / "cache"
            )
            assert Path(path).read_bytes() == content
            clone = ["git", "clone", "-q", f"{url}/kernels/a/one", str(tmp_path / "clone")]
            subprocess.run(clone, check=True, capture_output=True, env={**os.environ, "GIT_LFS_SKIP_SMUDGE": "1"})
        finally:
            process.terminate()
