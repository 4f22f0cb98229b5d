"""What nobody may do: by odd addresses, tokens without the right, races, clocks, and another Hub that is hostile."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pygit2
import pytest
import requests
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TOKEN, memory, target, until
from test_server_expensive import commit_tree
from test_server_permissions import BODIES, VALUES

from kernel_hub import tokens
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.routes.parameters import timestamp
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL

# Addresses


def ask(hub: RunningHub, line: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    """Send a request that no library would send, and return its status and its answer."""
    with socket.create_connection(target(hub.url), timeout=10) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
        answer = b""
        while block := connection.recv(1 << 16):
            answer += block
    return int(answer.split()[1]) if answer else 0, answer.decode("latin-1")


def test_addresses_that_are_no_text_are_refused_once(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """A NUL ended the connection with a traceback, or was read as the end of another name."""
    tokens.add(tmp_path / "tokens.json", "ci", read=(), write=("a",))
    hub = start_hub("--token-file", str(tmp_path / "tokens.json"))
    Hub(Settings(hub.root)).repositories.create("a/one", private=False, author="ci")
    api = "/api/kernels/a/one"
    odd = ["%00", "main%00x", "%ED%A0%80", "%FF", "a%0Ab", "%7F"]
    for value in odd:
        for address in (
            f"/api/a{value}b",
            f"/{value}",
            f"/api/kernels/a{value}/one",
            f"{api}/revision/{value}",
            f"{api}/tree/{value}/x",
            f"{api}/tree/main/{value}",
            f"{api}/commits/{value}",
            f"/kernels/a/one/resolve/{value}/x",
            f"/kernels/a/one/resolve/main/{value}",
            f"/kernels/a/one/commit/{value}",
            f"/api/models/a/one/revision/{value}",
        ):
            status, answer = ask(hub, f"GET {address}")
            assert status == 400 and "x-error-message" in answer.lower(), (address, answer)
    for address in ("/?search=%00", f"{api}?x=a%00b", "/kernels/a/one?version=%00", "/api/kernels?cursor=%00"):
        assert ask(hub, f"GET {address}")[0] == 400, address
    for host in ("[", "a b", "a/b", "x@y", "[::1", "a:99999999", "é"):
        assert ask(hub, "GET /", host=host)[0] == 400, host
    assert ask(hub, "GET /", host="[::1]:80")[0] == 200
    log = hub.log.read_text()
    assert "Traceback" not in log and '"error"' not in log


def test_texts_in_bodies_that_are_no_text_are_refused(hub: RunningHub) -> None:
    hub.api().create_repo("a/one", repo_type="kernel")
    api = f"{hub.url}/api/kernels/a/one"
    for odd in ("main\\u0000x", "\\ud800"):
        for method, address, body in (
            ("POST", f"{api}/branch/x", f'{{"startingPoint": "{odd}"}}'),
            ("POST", f"{api}/tag/main", f'{{"tag": "t", "message": "{odd}"}}'),
            ("POST", f"{api}/tag/main", f'{{"tag": "{odd}"}}'),
            ("POST", f"{hub.url}/api/repos/create", f'{{"name": "{odd}", "organization": "a", "type": "kernel"}}'),
            ("POST", f"{hub.url}/api/repos/create", f'{{"name": "x", "organization": "a", "type": "{odd}"}}'),
            ("POST", f"{hub.url}/api/repos/move", f'{{"fromRepo": "a/one", "toRepo": "{odd}", "type": "kernel"}}'),
            ("DELETE", f"{hub.url}/api/repos/delete", f'{{"name": "{odd}", "organization": "a", "type": "kernel"}}'),
            ("POST", f"{api}/lfs-files/batch", f'{{"deletions": {{"sha": ["{odd}"]}}}}'),
            ("POST", f"{api}/preupload/main", f'{{"files": [{{"path": "{odd}", "size": 1}}]}}'),
            ("POST", f"{hub.url}/api/validate-yaml", f'{{"content": "{odd}"}}'),
        ):
            answer = requests.request(method, address, data=body, headers={**TOKEN, "Content-Type": "application/json"})
            assert answer.status_code == 400 and answer.headers["X-Error-Message"], (address, body, answer.text)
    assert [ref.name for ref in hub.api().list_repo_refs("a/one", repo_type="kernel").branches] == ["main"]
    assert '"level": "error"' not in hub.log.read_text()


# Files


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_on_the_machine_reads_the_root(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for again in (False, True):
            hub = Hub(Settings(tmp_path / "hub"))
            hub.repositories.create(f"a/one{again}", private=True, author="a")
            if not again:  # as an earlier version left them
                (hub.root / "index.sqlite").chmod(0o644)
                (hub.root / "large").chmod(0o755)
    finally:
        os.umask(before)
    modes = {path.relative_to(hub.root).as_posix(): path.stat().st_mode & 0o777 for path in hub.root.rglob("*")}
    assert {modes[name] for name in ("index.sqlite", "index.lock", "secret")} == {0o600}
    private = ("repositories", "repositories/a/oneFalse.git", "repositories/a/oneTrue.git", "large", "large-xorbs")
    assert {modes[name] for name in (*private, "incoming")} == {0o700}


# Names: races


def test_of_those_who_want_one_name_at_once_one_gets_it(tmp_path: Path) -> None:
    hub = Hub(Settings(tmp_path / "hub"))

    def attempt(change: Callable[[], None]) -> str:
        try:
            change()
        except Refusal as refusal:
            return refusal.code
        return "done"

    for number in range(25):
        names = [f"a/{kind}{number}" for kind in ("m", "n")]
        for name in names:
            hub.repositories.create(name, private=False, author="a")
        wanted = f"a/t{number}"
        changes = [partial(hub.repositories.create, wanted, private=True, author="b")] * 3
        changes += [partial(hub.repositories.move, name, wanted) for name in names]
        with ThreadPoolExecutor(5) as pool:
            results = list(pool.map(attempt, changes))
        assert sorted(results) == ["Conflict"] * 4 + ["done"], results
        moved = results[3:].count("done")
        assert sum(name in hub.repositories for name in names) == 2 - moved
        assert hub.repositories.open(wanted).private is (moved == 0)
        for name in names:
            if name in hub.repositories:
                assert name not in hub.repositories.open(name).former_names()
    assert not [path for path in (tmp_path / "hub/repositories/a").iterdir() if path.name.startswith(".new-")]


# Time


def test_times_of_other_hubs_and_clocks_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert timestamp(2**62) == "9999-12-31T00:00:00.000Z" and timestamp(-5).startswith("1970-01-01")
    token = tokens.add(tmp_path / "tokens.json", "ci", read=(), write=("a",), expires=int(time.time()) + 100)
    hub = Hub(Settings(tmp_path / "hub", token_file=tmp_path / "tokens.json"))
    hub.repositories.create("a/one", private=False, author="a")
    caller = hub.tokens.caller(token)
    query = dict(item.split("=") for item in hub.sign("download", "a/one", "0" * 64, 1, caller).split("&"))

    def check() -> None:
        hub.check_signature("download", "a/one", "0" * 64, 1, int(query["expires"]), query["by"], query["signature"])

    check()
    now = time.time()
    for step in (-1e6, -3600.0, 3700.0, 1e9):
        monkeypatch.setattr(time, "time", lambda step=step: now + step)
        if step > 0:  # what has ended has ended
            for use in (check, lambda: hub.tokens.caller(token)):
                with pytest.raises(Refusal, match=r"expired|sign"):
                    use()
        # A clock that is wrong loses nothing: a name is created, and the index follows.
        name = f"a/at{int(step) % 1000}{step > 0}"
        hub.repositories.create(name, private=False, author="a")
        assert name in [item.repo_id for item in hub.index.page(None, count=50)]
        monkeypatch.setattr(time, "time", lambda: now)
    assert len(hub.index.page(None, count=50)) == 5
    check()


# Tokens


def every_route(hub: RunningHub, repo_id: str) -> Iterator[tuple[str, str, object]]:
    """Yield each route of the API for a repository, with a body that it takes."""
    organization, name = repo_id.split("/")
    for path, methods in requests.get(f"{hub.url}/openapi.json").json()["paths"].items():
        for method in methods:
            body = next((body for end, body in BODIES.items() if path.endswith(end)), None)
            known = {**VALUES, "organization": organization, "name": name, "revision:path": "main", "user": "ci"}
            for key, value in known.items():
                path = path.replace(f"{{{key}}}", value)  # noqa: PLW2901
            yield method, path, body


OPEN = {"/health", "/metrics", "/api/validate-yaml", "/v1/telemetry"}


def test_an_expired_token_is_no_token_on_any_route(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    old = tokens.add(file, "old", read=(), write=("a", "b"), expires=int(time.time()) + 3600)
    hub = start_hub("--token-file", str(file), "--audit-log", str(tmp_path / "audit"))
    hub.api(old).create_repo("a/one", repo_type="kernel")
    granted = requests.get(
        f"{hub.url}/api/kernels/a/one/xet-write-token/main", headers={"Authorization": f"Bearer {old}"}
    ).json()
    listed = json.loads(file.read_text())
    listed["tokens"][0]["expires"] = int(time.time()) - 1
    file.write_text(json.dumps(listed))
    tried = 0
    for method, path, body in every_route(hub, "a/one"):
        if path in OPEN or "/large/" in path or path.startswith("/xet/"):
            continue
        answer = requests.request(method, hub.url + path, json=body, headers={"Authorization": f"Bearer {old}"})
        # Some bodies are looked at first; nothing is done for them.
        assert answer.status_code == 403 or (answer.status_code in {400, 422} and body is None), (method, path, answer)
        tried += 1
    assert tried > 25
    for kind in (f"xorbs/default/{'1' * 64}", "shards"):
        answer = requests.post(
            f"{granted['casUrl']}/v1/{kind}", data=b"x", headers={"Authorization": f"Bearer {granted['accessToken']}"}
        )
        assert answer.status_code == 403
    assert requests.get(f"{hub.url}/kernels/a/one", auth=("any", old)).status_code == 403
    assert requests.get(f"{hub.url}/api/kernels/a/one").ok  # it is public


def test_who_may_only_read_proposes_and_does_nothing_else(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    owner, reader, other = (
        tokens.add(file, name, read=() if name == "owner" else (name,), write=("a",) if name == "owner" else ())
        for name in ("owner", "reader", "other")
    )
    hub = start_hub("--token-file", str(file))
    hub.api(owner).create_repo("a/one", repo_type="kernel")
    hub.api(owner).create_repo("a/shut", repo_type="kernel", private=True)

    def propose(token: str | None, path: str, content: bytes, repo_id: str = "a/one", **options: object) -> object:
        return hub.api(token).create_commit(
            repo_id, [CommitOperationAdd(path, content)], commit_message=path, repo_type="kernel", **options
        )

    large = os.urandom(1_500_000)
    assert propose(reader, "x.so", large, create_pr=True).pr_revision == "refs/pr/1"  # type: ignore[attr-defined]
    assert propose(other, "y", b"y", create_pr=True).pr_revision == "refs/pr/2"  # type: ignore[attr-defined]
    propose(reader, "more", b"m", revision="refs/pr/1")  # to its own
    for token, options, words in (
        (reader, {}, "no write scope"),
        (reader, {"revision": "refs/pr/2"}, "no write scope"),
        (None, {"create_pr": True}, "needs a token"),
        (None, {"revision": "refs/pr/1"}, "needs a token"),
    ):
        for content in (b"z", large[1:]):
            with pytest.raises(HfHubHTTPError, match=words):
                propose(token, "z.so", content, **options)
    with pytest.raises(HfHubHTTPError, match="404"):
        propose(reader, "z", b"z", "a/shut", create_pr=True)
    # Nothing else of the API does what it does for owners.
    head = {"Authorization": f"Bearer {reader}"}
    before = requests.get(f"{hub.url}/api/kernels/a/one/refs?include_prs=1").json()
    for method, path, body in every_route(hub, "a/one"):
        path = path.replace("/discussions/1", "/discussions/2")  # noqa: PLW2901
        read = method in {"get", "head"} or path in OPEN or "paths-info" in path or path.endswith("objects/batch")
        if not read and "/large/" not in path:
            answer = requests.request(method, hub.url + path, json=body, headers=head)
            assert answer.status_code in {400, 401, 403, 404}, (method, path, answer.text)
    assert requests.get(f"{hub.url}/api/kernels/a/one/refs?include_prs=1").json() == before
    # Its own it may take back; of many, the last is refused.
    for _ in range(31):
        propose(reader, os.urandom(4).hex(), b"x", create_pr=True)
    with pytest.raises(HfHubHTTPError, match="32 pull requests"):
        propose(reader, "too-many", b"x", create_pr=True)
    discussions = f"{hub.url}/api/kernels/a/one/discussions"
    assert requests.delete(f"{discussions}/3", headers=head).ok
    assert requests.post(f"{discussions}/1/merge", headers={"Authorization": f"Bearer {owner}"}).ok
    assert hub.api(None).file_exists("a/one", "x.so", repo_type="kernel")
    assert requests.delete(f"{discussions}/2", headers={"Authorization": f"Bearer {owner}"}).ok


# git


def packet(line: bytes) -> bytes:
    return f"{len(line) + 4:04x}".encode() + line


def test_git_gives_what_a_repository_has_and_nothing_of_others(hub: RunningHub) -> None:
    """Protocol v2 takes any object that is asked for by its id."""
    for name in ("a/one", "a/other"):
        hub.api().create_repo(name, repo_type="kernel", private=name == "a/other")
    here, other = (pygit2.Repository(str(hub.root / f"repositories/{name}.git")) for name in ("a/one", "a/other"))
    secret = other.create_blob(b"secret")
    elsewhere = commit_tree(other, other.TreeBuilder().write())
    unreached = here.create_blob(b"of a commit that was refused")
    head = str(here.references["refs/heads/main"].target)
    kind = {"Content-Type": "application/x-git-upload-pack-request", "Git-Protocol": "version=2"}

    def fetch(*wants: object, more: bytes = b"") -> bytes:
        lines = b"".join(packet(f"want {want}\n".encode()) for want in wants)
        body = packet(b"command=fetch") + b"0001" + more + lines + packet(b"done\n") + b"0000"
        answer = requests.post(f"{hub.url}/kernels/a/one/git-upload-pack", data=body, headers=kind, timeout=20)
        assert answer.status_code == 200
        return answer.content

    assert b"PACK" in fetch(head)
    assert b"PACK" in fetch(unreached)  # of this repository, to those who may read it and know its id
    for want in (secret, elsewhere, "0" * 40, "refs/heads/main", "../../other.git", "x" * 60_000):
        assert b"PACK" not in fetch(want), want
    # What is no request is answered at once, and loses no place.
    noise = [os.urandom(2000) for _ in range(4)]
    noise += [b"0000", b"0001", b"0002", b"0003", b"ffff", b"0005x", packet(b"command=" + b"x" * 5000) + b"0000"]
    noise += [packet(b"command=ls-refs") + b"0001" + packet(b"ref-prefix " + b"a" * 900) * 2000 + b"0000"]
    noise += [packet(b"command=object-info") + b"0001" + packet(f"oid {secret}".encode()) + b"0000"]
    noise += [
        packet(b"command=fetch") + b"0001" + packet(b"deepen 99999999999\n") + packet(b"deepen-not x\n") + b"0000"
    ]
    noise += [packet(b"command=fetch") + b"0001" + packet(f"want {head}\n".encode()) + packet(b"filter sparse:oid=x\n")]
    noise += [packet(b"command=fetch") + b"0001" + packet(f"want {head}\n".encode()) * 40_000 + b"0000"]
    for body in noise:
        began = time.monotonic()
        answer = requests.post(f"{hub.url}/kernels/a/one/git-upload-pack", data=body, headers=kind, timeout=20)
        assert answer.status_code in {200, 413} and time.monotonic() - began < 10, body[:80]
        assert b"secret" not in answer.content
    for protocol in ("version=2:version=1", "version=99", "x" * 3000, "version=2\tx"):
        assert requests.post(
            f"{hub.url}/kernels/a/one/git-upload-pack", data=b"0000", headers={**kind, "Git-Protocol": protocol}
        ).status_code in {200, 400}
    assert requests.get(f"{hub.url}/kernels/a/one/info/refs?service=git-upload-pack").ok
    assert '"level": "error"' not in hub.log.read_text()


# Scripts


SCRIPT = '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(2)</script></svg>'


def test_no_file_runs_a_script_in_the_browser_of_a_reader(hub: RunningHub) -> None:
    hub.api().create_repo(KERNEL, repo_type="kernel")
    names = [
        "a.svg",
        "a.html",
        "a.xhtml",
        "a.xml",
        "a.js",
        "a.pdf",
        "a.htm\u00e9",
        "quote\"'><script>alert(3)<.svg",
        "a;b=c.svg",
    ]
    lines = [{"key": "header", "value": {"summary": "<script>alert(4)</script>", "description": "</pre><img src=x>"}}]
    lines += [{"key": "file", "value": {"path": name, "content": SCRIPT}} for name in names]
    lines += [{"key": "file", "value": {"path": f"benchmarks/{names[7]}", "content": SCRIPT}}]
    card = f'# <script>x</script>\n\n<a href="javascript:x">x</a> <svg onload=x> ![x](x"onerror=alert(5).svg)\n{SCRIPT}'
    lines += [{"key": "file", "value": {"path": "README.md", "content": card}}]
    body = "\n".join(map(json.dumps, lines))
    done = requests.post(f"{hub.url}/api/kernels/{KERNEL}/commit/main", data=body, headers=TOKEN).json()
    for name in names:
        answer = requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/main/{requests.utils.quote(name, safe='')}")
        assert answer.content.decode() == SCRIPT
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "sandbox" in policy and "script" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Type"].split(";")[0] in {"text/plain", "image/svg+xml"}, name
        assert all(character not in answer.headers["Content-Disposition"] for character in '"<>')
    for page in (f"/kernels/{KERNEL}", f"/kernels/{KERNEL}/commit/{done['commitOid']}", "/", f"/{KERNEL}"):
        answer = requests.get(hub.url + page)
        assert answer.status_code == 200 and "script-src" not in answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for forbidden in ("<script", "onload=", "<svg", "javascript:", '"onerror='):
            assert forbidden not in answer.text.replace("&lt;", ""), (page, forbidden)
    for page in ("/?search=%3Cscript%3E", "/kernels/%3Cscript%3E/x", "/a/%3Cscript%3E", "/%3Cscript%3E"):
        answer = requests.get(hub.url + page, headers={"Accept": "text/html"})
        assert "<script" not in answer.text


# Older clients


def test_the_addresses_of_models_read_kernels_and_write_nothing(
    start_hub: Callable[..., RunningHub], tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    owner = tokens.add(file, "ci", read=(), write=("a",))
    hub = start_hub("--token-file", str(file))
    api = hub.api(owner)
    api.create_repo("a/one", repo_type="kernel")
    api.create_repo("a/shut", repo_type="kernel", private=True)

    def commit(**options: str) -> None:
        api.create_commit("a/one", [CommitOperationAdd("x", b"x")], commit_message="m", **options)

    commit(repo_type="kernel")
    assert api.model_info("a/one").id == "a/one" and api.file_exists("a/one", "x")
    assert api.list_repo_files("a/one") == ["x"]
    for change in (
        commit,
        lambda: api.create_branch("a/one", branch="b"),
        lambda: api.create_repo("a/two"),
        lambda: api.delete_repo("a/one"),
    ):
        with pytest.raises(HfHubHTTPError, match="kernel"):
            change()
    assert not hub.api(None).repo_exists("a/shut") and hub.api(owner).repo_exists("a/shut")
    api.move_repo("a/one", "a/new", repo_type="kernel")
    assert api.model_info("a/one").id == "a/new" and api.file_exists("a/one", "x")
    page = requests.get(f"{hub.url}/a/new", allow_redirects=False)
    assert page.status_code == 307 and page.headers["Location"] == "/kernels/a/new"
    assert requests.get(f"{hub.url}/a/new").ok and requests.get(f"{hub.url}/a/shut").status_code == 404
    assert requests.get(f"{hub.url}/api/nothing").status_code == 501


# Another Hub


class Hostile(http.server.BaseHTTPRequestHandler):
    """Another Hub that sends what `answers` has for a path, redirects to it if it is an address, or waits for it."""

    answers: dict[str, bytes | str | threading.Event]
    seen: list[str]

    def do_GET(self) -> None:
        type(self).seen.append(self.path)
        answer = next((value for path, value in self.answers.items() if self.path.startswith(path)), None)
        if isinstance(answer, threading.Event):
            answer.wait(60)
        elif isinstance(answer, bytes):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        else:
            self.send_response(404 if answer is None else 302)
            if answer is not None:
                self.send_header("Location", answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(answers: Mapping[str, bytes | str | threading.Event]) -> Iterator[tuple[str, list[str]]]:
    """Serve answers, and yield the address and the paths that were asked for."""
    handler = type("Answers", (Hostile,), {"answers": answers, "seen": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.seen
        server.shutdown()


def processes_with(words: str) -> list[str]:
    """Return the command lines that have these words."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_text())
    return [line for line in lines if words in line]


def test_no_git_of_a_mirror_outlives_the_server(start_hub: Callable[..., RunningHub]) -> None:
    refs = json.dumps({"branches": [{"ref": "refs/heads/main", "targetCommit": "1" * 40}], "tags": []}).encode()
    over = threading.Event()
    with served({"/api/kernels/a/one/refs": refs, "/kernels/a/one": over}) as (url, _), ThreadPoolExecutor(1) as pool:
        hub = start_hub("--mirror", url, "--mirror-organization", "a")
        pool.submit(requests.get, f"{hub.url}/api/kernels/a/one", timeout=60)
        assert until(lambda: len(processes_with(f"{url}/kernels/a/one")) >= 2)  # git, and what it has started
        began = time.monotonic()
        hub.send_signal(signal.SIGTERM)
        hub.wait()
        assert time.monotonic() - began < 6
        assert until(lambda: not processes_with(f"{url}/kernels/a/one"), seconds=2)
        over.set()


def test_redirects_of_another_hub_do_not_reach_this_network(start_hub: Callable[..., RunningHub]) -> None:
    refs = json.dumps({"branches": [{"ref": "refs/heads/main", "targetCommit": "1" * 40}], "tags": []}).encode()
    with (
        served({"/": b'{"branches": [], "tags": [], "secret": "of this network"}'}) as (internal, reached),
        served(
            {
                "/api/kernels/a/refs/refs": f"{internal}/refs",
                "/api/kernels/a/file/refs": "file:///etc/passwd",
                "/api/kernels/a/ftp/refs": "ftp://127.0.0.1/x",
                "/api/kernels/a/data/refs": "data:,x",
                "/api/kernels/a/git/refs": refs,
                "/kernels/a/git/": f"{internal}/git",
                "/api/kernels/a/loop/refs": "/api/kernels/a/loop/refs",
                "/api/kernels/a/deep/refs": b"[" * 200_000,
                "/api/kernels/a/many/refs": json.dumps(
                    {
                        "branches": [{"ref": f"refs/heads/b{n}", "targetCommit": "1" * 40} for n in range(50_000)],
                        "tags": [],
                    }
                ).encode(),
                "/api/kernels/a/long/refs": b" " * (9 << 20),
            }
        ) as (url, asked),
    ):
        hub = start_hub("--mirror", url, "--mirror-organization", "a")
        for name in ("refs", "file", "ftp", "data", "git", "loop", "deep", "many", "long"):
            answer = requests.get(f"{hub.url}/api/kernels/a/{name}", timeout=60)
            assert answer.status_code == 502, (name, answer.text)
            assert "secret" not in answer.text and "root:" not in answer.text and len(answer.text) < 2000
        assert reached == [] and asked
    assert not list((hub.root / "repositories/a").glob("*.git"))
    assert '"level": "error"' not in hub.log.read_text()


def test_what_another_hub_has_in_git_is_counted_before_it_is_served(
    start_hub: Callable[..., RunningHub], tmp_path: Path
) -> None:
    upstream = start_hub(root=tmp_path / "upstream")
    for name in ("blob", "message", "dates", "links"):
        upstream.api().create_repo(f"a/{name}", repo_type="kernel")

    def git(name: str) -> pygit2.Repository:
        return pygit2.Repository(str(upstream.root / f"repositories/a/{name}.git"))

    blob = git("blob")
    builder = blob.TreeBuilder()
    builder.insert("zeros", blob.create_blob(bytes(300_000_000)), pygit2.enums.FileMode.BLOB)
    commit_tree(blob, builder.write())
    message = git("message")
    who = pygit2.Signature("a", "a@b")
    tip = message.references["refs/heads/main"].target
    message.create_commit("refs/heads/main", who, who, "m" * 20_000_000, message[tip].tree_id, [tip])
    dates = git("dates")
    commit_tree(dates, dates.TreeBuilder().write(), seconds=2**40)
    links = git("links")
    builder = links.TreeBuilder()
    builder.insert("link", links.create_blob(b"/etc/passwd"), pygit2.enums.FileMode.LINK)
    builder.insert("module", pygit2.Oid(hex="1" * 40), pygit2.enums.FileMode.COMMIT)
    commit_tree(links, builder.write())
    hub = start_hub("--mirror", upstream.url, "--mirror-organization", "a", root=tmp_path / "mirror")
    before = memory(hub)
    for name in ("blob", "message"):
        answer = requests.get(f"{hub.url}/api/kernels/a/{name}", timeout=60)
        assert answer.status_code == 502 and "objects of type" in answer.text
    assert memory(hub) - before < 100
    for rest in ("", "/tree/main?expand=true", "/commits/main", "/refs"):
        assert requests.get(f"{hub.url}/api/kernels/a/dates{rest}").ok, rest
        assert requests.get(f"{hub.url}/api/kernels/a/links{rest}").ok, rest
    assert requests.get(f"{hub.url}/kernels/a/dates").ok
    assert requests.get(f"{hub.url}/kernels/a/links/resolve/main/link").text == "/etc/passwd"
    assert requests.get(f"{hub.url}/kernels/a/links/resolve/main/module").status_code == 404
    assert '"level": "error"' not in hub.log.read_text()


def test_hostile_names_of_another_hub_lead_nowhere(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """git takes any bytes for a name: what no file of this Hub may be called is neither listed nor sent."""
    upstream = start_hub(root=tmp_path / "upstream")
    upstream.api().create_repo("a/one", repo_type="kernel")
    git = pygit2.Repository(str(upstream.root / "repositories/a/one.git"))
    blob = git.create_blob(b"x").raw
    hostile = [
        *(b"..", b".", b".git", b".GIT", b"a/b", b"/etc", b"../../x", b"a\\b", b"con", b"nul.txt", b"C:", b"x" * 300),
        *(b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J", b"\xe2\x80\xaeabc", b"a\nb", b"~ ", b"build/../x", b" ", b"-"),
    ]
    part = b"".join(b"100644 " + name + b"\0" + blob for name in sorted([*hostile, b"plain"]))
    inner = git.odb.write(pygit2.enums.ObjectType.TREE, part)
    rows = [(b"100644", name, blob) for name in hostile] + [
        (b"40000", b"build", inner.raw),
        (b"40000", b"..", inner.raw),
    ]
    rows += [(b"100644", b"README.md", git.create_blob(b"# \x1b[2J<script>").raw)]
    rows.sort(key=lambda row: row[1] + b"/" * (row[0] == b"40000"))
    trees = [
        git.odb.write(pygit2.enums.ObjectType.TREE, b"".join(b"%s %s\0%s" % row for row in order))
        for order in (rows, rows[::-1])
    ]
    who = b"\xff\x1b[2J <a@b> 1 +0000\n"
    for ref, tree in zip(("main", "unsorted"), trees, strict=True):
        text = b"tree %s\nauthor %scommitter %sencoding none\n\n\xff <script>\x1b[2J" % (str(tree).encode(), who, who)
        commit = git.odb.write(pygit2.enums.ObjectType.COMMIT, text)
        git.references.create(f"refs/heads/{ref}", commit, force=True)
    hub = start_hub("--mirror", upstream.url, "--mirror-organization", "a", root=tmp_path / "mirror")
    for served_by in (hub, upstream):
        api = f"{served_by.url}/api/kernels/a/one"
        for rest in ("", "?expand=true", "?recursive=true", "/build", "/build?expand=true"):
            answer = requests.get(f"{api}/tree/main{rest}")
            assert answer.ok, (rest, answer.text)
            listed = [entry["path"] for entry in answer.json()]
            assert set(listed) <= {"build", "-", "README.md", "build/plain", "build/-"}, listed
            assert requests.get(f"{api}/tree/unsorted{rest}").status_code in {200, 404}
        assert requests.get(f"{api}/commits/main").json()[0]["authors"]
        for page in ("/kernels/a/one", f"/kernels/a/one/commit/{git.references['refs/heads/main'].target}"):
            answer = requests.get(served_by.url + page)
            assert answer.status_code == 200 and "<script" not in answer.text
        for name in hostile:
            address = f"/kernels/a/one/resolve/main/{requests.utils.quote(name, safe='')}"
            assert ask(served_by, f"GET {address}")[0] in {400, 404} or name == b"-", name
        assert '"level": "error"' not in served_by.log.read_text()
    assert hub.api(None).snapshot_download("a/one", repo_type="kernel", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.rglob("x"))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"upstream", "mirror", "cache"}
