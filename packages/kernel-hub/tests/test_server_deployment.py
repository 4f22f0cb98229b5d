"""The files of deploy/: checked by their own programs where there are such, and nginx in front of a real Hub."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from huggingface_hub import HfApi
from raw_requests import commit, until

from kernel_hub import tokens
from tests.support.loopback import QuietHandler, served
from tests.support.running_hub import RunningHub

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def behind_nginx(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A function that starts nginx with the site of deploy/, changed by replacements, and returns its address."""
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    with ExitStack() as started:

        def start(hub: RunningHub, *replaced: tuple[str, str]) -> str:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            site = (DEPLOY / "nginx.conf").read_text()
            for name, value in (
                ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
                ("    ssl_certificate /etc/ssl/hub.example.org.pem;\n", ""),
                ("    ssl_certificate_key /etc/ssl/hub.example.org.key;\n", ""),
                *replaced,
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
            process = started.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            started.callback(process.terminate)
            url = f"http://127.0.0.1:{port}"
            assert until(lambda: answers(url))
            return url

        yield start


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health").ok
    except requests.ConnectionError:
        return False


def test_nginx_hands_on_large_bodies_and_encoded_slashes(
    start_hub: Callable[..., RunningHub], behind_nginx: Callable[..., str], tmp_path: Path
) -> None:
    url = behind_nginx(start_hub("--trust", "a", FORWARDED_ALLOW_IPS="127.0.0.1"))
    api = HfApi(endpoint=url, token="any")
    api.create_repo("a/one", repo_type="kernel")
    content = os.urandom(3_000_000)  # above nginx's own limit of 1 MB
    made = commit(api, "a/one", "x.bin", content, create_pr=True)
    assert made.pr_url.startswith(url)
    path = api.hf_hub_download("a/one", "x.bin", repo_type="kernel", revision="refs/pr/1", cache_dir=tmp_path / "cache")
    assert Path(path).read_bytes() == content
    clone = ["git", "clone", "-q", f"{url}/kernels/a/one", str(tmp_path / "clone")]
    subprocess.run(clone, check=True, capture_output=True, env={**os.environ, "GIT_LFS_SKIP_SMUDGE": "1"})


class Sessions(QuietHandler):
    """Answers as oauth2-proxy: 202 with the user of the cookie, or 401."""

    def do_GET(self) -> None:
        user = self.headers.get("Cookie", "").removeprefix("user=")
        self.send_response(202 if user else 401)
        if user:
            self.send_header("X-Auth-Request-Email", f"{user}@example.org")
            self.send_header("X-Auth-Request-Groups", f"everyone,{user}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.attack
def test_users_of_the_single_sign_on(
    start_hub: Callable[..., RunningHub], behind_nginx: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    proxy = tokens.add(file, "proxy", read=(), write=(), groups=("ann=a",))
    writer = tokens.add(file, "ci", read=(), write=("a",))
    hub = start_hub("--token-file", str(file))
    with served(Sessions) as sessions:
        site = (DEPLOY / "nginx-sign-on.conf").read_text().replace("http://127.0.0.1:4180", sessions)
        user = (DEPLOY / "nginx-user.conf").read_text().replace("hf_TOKEN", proxy)
        url = behind_nginx(hub, ("    location / {", f"{site}\n    location / {{\n{user}"))
        api = HfApi(endpoint=url, token=writer)
        api.create_repo("a/one", repo_type="kernel", private=True)
        commit(api, "a/one", "x.bin", os.urandom(2_000_000))
        forged = {"X-Forwarded-User": "ann", "X-Forwarded-Groups": "ann", "X-Hub-Proxy-Token": proxy}
        for cookie, headers, found in (("ann", {}, True), ("bob", {}, False), ("", {}, False), ("bob", forged, False)):
            page = requests.get(f"{url}/", headers={**headers, "Cookie": f"user={cookie}"} if cookie else headers).text
            assert ("a/one" in page) is found, page
            assert (f"{cookie}@example.org" in page) is bool(cookie)
        file_url = f"{url}/kernels/a/one/resolve/main/x.bin"
        assert len(requests.get(file_url, headers={"Cookie": "user=ann"}).content) == 2_000_000
        assert requests.get(file_url).status_code == 404
        signed_out = requests.get(f"{url}/logout", allow_redirects=False)
        assert signed_out.headers["Location"].endswith("/oauth2/sign_out?rd=/")
