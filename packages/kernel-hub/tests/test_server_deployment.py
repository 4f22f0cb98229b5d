"""The files of deploy/, nginx in front of a real Hub, two servers of one root, and the backup."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TokenHub, commit, hub_command, until

from kernel_hub import tokens
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.alternating_proxy import alternating_proxy
from tests.support.files import write_program
from tests.support.git import git
from tests.support.loopback import QuietHandler, served
from tests.support.programs import run
from tests.support.running_hub import RunningHub, running_hub
from tests.support.small_kernel import write_kernel

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def behind_nginx(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A function that starts nginx with the site of deploy/, changed by replacements, and returns its address."""
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    with ExitStack() as started:

        def start(hub: RunningHub, *replaced: tuple[str, str]) -> str:
            reserved = started.enter_context(socket.socket())  # until nginx ends: no other process gets its port
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            site = (DEPLOY / "nginx.conf").read_text()
            for name, value in (
                ("listen 443 ssl;", f"listen 127.0.0.1:{port} reuseport;"),
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


@pytest.mark.attack
def test_nginx_hands_on_large_bodies_encoded_slashes_and_long_reasons(
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
    names = ["/".join([f"{number}" + "p" * 240] * 4) for number in range(5)]
    changes = [[CommitOperationAdd(name, content) for name in names] for content in (b"theirs", b"ours")]
    made = api.create_commit("a/one", changes[0], commit_message="m", repo_type="kernel", create_pr=True)
    api.create_commit("a/one", changes[1], commit_message="m", repo_type="kernel")
    merge = f"{url}/api/kernels/a/one/discussions/{made.pr_num}/merge?commit={made.oid}"
    refused = requests.post(merge, headers={"Authorization": "Bearer any"})
    assert refused.status_code == 409 and all(name in refused.json()["error"] for name in names)
    clone = ["git", "clone", "-q", f"{url}/kernels/a/one", str(tmp_path / "clone")]
    subprocess.run(clone, check=True, capture_output=True, env={**os.environ, "GIT_LFS_SKIP_SMUDGE": "1"})


class Sessions(QuietHandler):
    """Answers as oauth2-proxy: 202 with the user of the cookie, or 401."""

    def do_GET(self) -> None:
        user = self.headers.get("Cookie", "").removeprefix("user=")
        named = {"X_Auth_Request_Email": f"{user}@example.org", "X_Auth_Request_Groups": f"everyone,{user}"}
        self.send(202 if user else 401, **(named if user else {}))


@pytest.mark.attack
def test_users_of_the_single_sign_on(token_hub: TokenHub, behind_nginx: Callable[..., str]) -> None:
    hub, proxy, writer = token_hub(proxy={"groups": ("ann=a",)}, ci={"write": ("a",)})
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


@pytest.mark.parametrize(
    "command",
    [
        "caddy validate --adapter caddyfile --config Caddyfile",
        "logrotate --debug kernel-hub.logrotate",
        "systemd-analyze verify kernel-hub.service",
    ],
)
def test_files_of_other_programs_are_valid(command: str, tmp_path: Path) -> None:
    program, *arguments, file = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install {program.partition('-')[0]}")
    text = (DEPLOY / file).read_text().replace("/opt/kernel-hub/bin/kernel-hub", sys.executable)
    (tmp_path / file).write_text(text.replace("hub hub", "root root"))
    done = subprocess.run([program, *arguments, tmp_path / file], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "error:" not in done.stderr, done.stderr


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Callable[..., tuple[str, list[RunningHub]]]]:
    """A function that starts two servers of one root at the same time; it returns their proxy's address, and them."""
    with ExitStack() as started:

        def start(*arguments: str) -> tuple[str, list[RunningHub]]:
            with ThreadPoolExecutor(2) as pool:
                pair = list(pool.map(lambda _: started.enter_context(running_hub(tmp_path, *arguments)), range(2)))
            return started.enter_context(alternating_proxy([hub.url for hub in pair])), pair

        yield start


def test_a_pair_serves_the_public_clients_as_one(
    proxied: Callable[..., tuple[str, list[RunningHub]]], tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    token = tokens.add(file, "ci", read=(), write=("a",))
    url, pair = proxied("--token-file", str(file), "--trust", "a")
    api = HfApi(endpoint=url, token=token)
    folder = write_kernel(tmp_path / "kernel", repo_id="a/twice")
    api.create_repo("a/twice", repo_type="kernel", private=True)
    api.create_branch("a/twice", branch="v1", repo_type="kernel")
    api.upload_folder(repo_id="a/twice", folder_path=folder, repo_type="kernel", revision="v1")

    # Each server immediately serves the changes of the other.
    for number in range(8):
        oid = commit(api, "a/twice", "f", str(number).encode()).oid
        assert api.repo_info("a/twice", repo_type="kernel").sha == oid
        listed = requests.get(f"{url}/api/kernels", headers={"Authorization": f"Bearer {token}"}).json()
        assert oid in [item["sha"] for item in listed]
    wanted = commit(api, "a/twice", "pr", create_pr=True)
    merge = f"{url}/api/kernels/a/twice/discussions/{wanted.pr_num}/merge?commit={wanted.oid}"
    assert requests.post(merge, headers={"Authorization": f"Bearer {token}"}).ok
    assert api.file_exists("a/twice", "pr", repo_type="kernel")
    assert wanted.pr_url.startswith(url)
    added = HfApi(endpoint=url, token=tokens.add(file, "late", read=("a",), write=()))
    assert all(added.repo_exists("a/twice", repo_type="kernel") for _ in range(2))
    tokens.remove(file, "late")
    for _ in range(2):
        with pytest.raises(HfHubHTTPError, match="Invalid user token"):
            added.whoami(cache=False)
    answered = [hub.log.read_text().count('"event": "request"') for hub in pair]
    assert min(answered) > 20, answered


def test_a_pair_loses_nothing_while_its_servers_are_killed(
    proxied: Callable[..., tuple[str, list[RunningHub]]], tmp_path: Path
) -> None:
    url, pair = proxied()
    HfApi(endpoint=url, token="any").create_repo("a/one", repo_type="kernel")
    made: list[str] = []

    def write(name: str) -> None:
        api = HfApi(endpoint=url, token="any")
        for number in range(8):
            content = os.urandom(1_100_000) if number % 4 == 0 else os.urandom(9)
            made.append(commit(api, "a/one", f"{name}-{number}{'.bin' if number % 4 == 0 else ''}", content).oid)

    for is_killed in (False, True):
        if is_killed:
            pair[0].kill()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, [f"{is_killed}-{number}" for number in range(3)]))
    assert len(set(made)) == 48
    api = HfApi(endpoint=url, token="any")
    history = {item.commit_id for item in api.list_repo_commits("a/one", repo_type="kernel")}
    assert history >= set(made)
    assert json.loads(hub_command("check", "--digests", "--json", "--root", pair[1].root).stdout) == []


BACKUP = Path(__file__).parents[3] / "deploy" / "backup.sh"


def test_a_backup_beside_writers_is_restored(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    hub = start_hub()
    names = ["a/one", "b/two"]
    made: dict[str, list[str]] = {name: [] for name in names}
    stop = threading.Event()

    def write(name: str) -> None:
        api = hub.api()
        while not stop.is_set():
            number = len(made[name])
            content = os.urandom(1_200_000) if number % 5 == 0 else os.urandom(20).hex().encode()
            made[name].append(commit(api, name, f"f{number}.bin" if number % 5 == 0 else "f", content).oid)

    def pack() -> None:
        while not stop.wait(0.3):
            for name in names:
                where = ["git", "-c", "safe.directory=*", "-C", str(hub.root / f"repositories/{name}.git")]
                subprocess.run([*where, "repack", "-adq"], check=False, capture_output=True)
                subprocess.run([*where, "pack-refs", "--all"], check=False, capture_output=True)

    def delete() -> None:
        while not stop.is_set():
            hub.api().create_repo("c/gone", repo_type="kernel")
            commit(hub.api(), "c/gone", "x.so", os.urandom(1_200_000))
            hub.api().delete_repo("c/gone", repo_type="kernel")

    for name in names:
        hub.api().create_repo(name, repo_type="kernel", private=name == "b/two")
    with ThreadPoolExecutor(4) as pool, ExitStack() as stopped:
        stopped.callback(stop.set)
        workers = [*(pool.submit(write, name) for name in names), pool.submit(pack), pool.submit(delete)]
        while min(len(oids) for oids in made.values()) < 8:
            assert not any(worker.done() for worker in workers)
            stop.wait(0.05)
        before = {name: len(oids) for name, oids in made.items()}
        run(BACKUP, hub.root, tmp_path / "backup")
    hub.kill()
    shutil.rmtree(hub.root)

    shutil.copytree(tmp_path / "backup", tmp_path / "restored")
    hub_command("check", "--digests", "--root", tmp_path / "restored", check=True)
    restored = start_hub(root=tmp_path / "restored")
    for name in names:
        api = restored.api()
        head = api.repo_info(name, repo_type="kernel").sha
        assert made[name].index(head) >= before[name] - 1  # every commit that was acknowledged before
        for path in api.list_repo_files(name, repo_type="kernel"):
            assert Path(api.hf_hub_download(name, path, repo_type="kernel", cache_dir=tmp_path / "cache")).is_file()
        commit(api, name, "after")
        git(restored.root / f"repositories/{name}.git", "fsck", "--strict")
    assert restored.api().repo_info("b/two", repo_type="kernel").private
    assert subprocess.run([str(BACKUP), str(tmp_path), str(tmp_path / "x")], check=False).returncode == 2


@pytest.mark.attack
def test_a_backup_has_repositories_that_are_renamed_at_its_end(tmp_path: Path) -> None:
    """r1 is renamed when all are copied, and r2 when the copy of r1 is removed."""
    hub, programs = tmp_path / "hub", tmp_path / "bin"
    for name in ("a/r0", "a/r1", "a/r2"):
        Hub(Settings(hub)).repositories.create(name, private=False, author="a")
    for program, copy, old, new in (("find", "r2", "r1", "x1"), ("rm", "r1", "r2", "x2")):
        move = f"cd {hub}/repositories/a && [ ! -d {old}.git ] || mv {old}.git {new}.git"
        before = f'case "$*" in */{copy}.git*) ({move}) ;; esac'
        write_program(programs / program, f'{before}\nexec {shutil.which(program)} "$@"')
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run([str(BACKUP), str(hub), str(tmp_path / "copy")], check=True, env=environment)
    copies = {path.name for path in (tmp_path / "copy/repositories/a").iterdir()}
    assert copies == {"r0.git", "x1.git", "x2.git"}
