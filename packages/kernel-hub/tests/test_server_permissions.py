"""Permissions: tokens, private repositories, read-only servers, malformed addresses, and scripts."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pygit2
import pytest
import requests
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TOKEN, TokenHub, commit, hub_command, target

from kernel_format.errors import ConfigError
from kernel_hub import maintenance, tokens
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel

pytestmark = pytest.mark.attack


def test_tokens_and_private_repositories(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=(), write=("ours",))
    reader = tokens.add(file, "desk", read=("ours",), write=())
    other = tokens.add(file, "guest", read=(), write=("theirs",))
    assert writer not in file.read_text() and file.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="already"):
        tokens.add(file, "ci", read=("x",), write=())
    with ThreadPoolExecutor(8) as at_once:
        list(at_once.map(lambda number: tokens.add(file, f"t{number}", read=("x",), write=()), range(20)))
    assert len(tokens.TokenFile(file).tokens()) == 23
    hub = start_hub("--token-file", str(file))
    kernel = write_kernel(tmp_path / "one")
    publish_kernel(hub, kernel, writer, "ours/open")
    publish_kernel(hub, kernel, writer, "ours/secret", private=True)

    assert hub.api(reader).whoami()["orgs"][0]["roleInOrg"] == "read"
    assert hub.api(None).repo_exists("ours/open", repo_type="kernel")
    assert hub.api(reader).repo_exists("ours/secret", repo_type="kernel")
    assert "ours/secret" not in requests.get(f"{hub.url}/").text
    settings, known = f"{hub.url}/api/kernels/ours/open/settings", {"Authorization": f"Bearer {writer}"}
    for private in (True, False):  # the clients refuse this for kernels by themselves
        assert requests.put(settings, json={"private": private}, headers=known).ok
        assert requests.put(settings, json={"private": "yes"}, headers=known).status_code == 400
        assert hub.api(None).repo_exists("ours/open", repo_type="kernel") is not private

    for token, message in ((reader, "may only read ours"), (other, "no write scope for ours"), (None, "needs a token")):
        with pytest.raises(HfHubHTTPError, match=message):
            commit(hub.api(token), "ours/open", "a")
    with pytest.raises(HfHubHTTPError, match="no write scope for ours"):
        hub.api(other).create_repo("ours/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        hub.api("hf_wrong").whoami()

    # The digest of a private file is not enough to read it.
    sha256 = hashlib.sha256((kernel / "build" / VARIANT / "table.bin").read_bytes()).hexdigest()
    hub.api(other).create_repo("theirs/copy", repo_type="kernel")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize 1280000\n".encode()
    with pytest.raises(HfHubHTTPError, match="was not uploaded to theirs/copy"):
        commit(hub.api(other), "theirs/copy", "x", pointer)
    version, digest, size = pointer.splitlines(keepends=True)  # which a merge of lines would join
    commit(hub.api(other), "theirs/copy", "x", b"1\n" + digest + b"3\n")
    proposed = commit(hub.api(other), "theirs/copy", "x", b"1\n" + digest + size, create_pr=True)
    commit(hub.api(other), "theirs/copy", "x", version + digest + b"3\n")
    merge = f"{hub.url}/api/kernels/theirs/copy/discussions/1/merge?commit={proposed.oid}"
    assert requests.post(merge, headers={"Authorization": f"Bearer {other}"}).status_code == 409
    git = pygit2.Repository(str(hub.root / "repositories/theirs/copy.git"))
    files = git.TreeBuilder()
    files.insert("x", git.create_blob(pointer), pygit2.enums.FileMode.BLOB)
    author = pygit2.Signature("a", "a@b")
    git.create_commit("refs/heads/pushed", author, author, "", files.write(), [])  # as the operator's `git push` does
    defects = list(maintenance.find_defects(Hub(Settings(hub.root))))
    assert [(item.where, item.repaired) for item in defects] == [(f"theirs/copy: large file {sha256}", False)]
    assert requests.get(f"{hub.url}/kernels/theirs/copy/resolve/pushed/x").status_code == 404

    tokens.remove(file, "ci")
    with pytest.raises(HfHubHTTPError, match="401"):
        commit(hub.api(writer), "ours/open", "a")


BODIES = {
    "/branch/{revision}": {},
    "/tag/{revision}": {"tag": "x"},
    "/paths-info/{revision}": {"paths": ["x"]},
    "/preupload/{revision}": {"files": []},
    "/objects/batch": {"operation": "download", "objects": []},
    "/settings": {"private": False},
}
VALUES = {"revision": "main", "path": ".gitattributes", "number": "1", "sha256": "0" * 64}


def every_route(hub: RunningHub, repo_id: str) -> Iterator[tuple[str, str, object]]:
    """Yield each route of the API for a repository, with a body that it takes."""
    organization, name = repo_id.split("/")
    for route, methods in requests.get(f"{hub.url}/openapi.json").json()["paths"].items():
        body = next((body for end, body in BODIES.items() if route.endswith(end)), None)
        path = route
        for key, value in {**VALUES, "organization": organization, "name": name, "revision:path": "main"}.items():
            path = path.replace(f"{{{key}}}", value)
        yield from ((method, path, body) for method in methods)


def test_a_private_repository_is_hidden_on_every_route(token_hub: TokenHub) -> None:
    """Clients without access get the same answers for a private repository as for one that does not exist."""
    hub, writer, other = token_hub(ci={"write": ("ours",)}, guest={"write": ("theirs",)})
    hub.api(writer).create_repo("ours/secret", repo_type="kernel", private=True)
    pages = ("/{}", "/{}/commit/main", "/{}/discussions/1", "/{}.git/info/refs", "/{}.git/HEAD")
    routes = [
        [*every_route(hub, repo_id), *(("get", f"/kernels{page.format(repo_id)}", None) for page in pages)]
        for repo_id in ("ours/secret", "ours/nowhere")
    ]
    pairs = [pair for pair in zip(*routes, strict=True) if pair[0] != pair[1]]
    assert len(pairs) > 20
    for pair in pairs:
        query = {"size": 1, "expires": 1, "signature": "x"} if "/large/" in pair[0][1] else {}
        parameters = {**query, "commit": "0" * 40}
        for token in (None, other):
            answers = []
            for name, (method, path, body) in zip(("secret", "nowhere"), pair, strict=True):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                got = requests.request(method, hub.url + path, json=body, params=parameters, headers=headers)
                left_out = {"date", "x-request-id", "content-length"}
                shown = {key: value.replace(name, "…") for key, value in got.headers.items() if key not in left_out}
                answers.append((got.status_code, got.text.replace(name, "…"), shown))
            assert answers[0] == answers[1], pair
            assert answers[0][0] == (403 if query else 404), (pair, answers[0])


def test_a_public_address_needs_tokens() -> None:
    done = hub_command("serve", "--host", "0.0.0.0")
    assert done.returncode == ConfigError.exit_code and "without tokens" in done.stderr


def test_read_only_and_foreign_host_names(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    hub = start_hub("--read-only")
    with pytest.raises(HfHubHTTPError, match="read-only"):
        hub.api().create_repo(KERNEL, repo_type="kernel")
    publish_kernel(start_hub(root=tmp_path / "disk"), write_kernel(tmp_path / "kernel"))
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0:
        disk = tmp_path / "disk"
        (disk / "index.sqlite").unlink()
        mount = f"mount --bind {disk} {disk} && mount -o remount,ro,bind {disk}"
        serve = f"exec {sys.executable} -m kernel_builder hub serve --json --root {disk} --read-only"
        command = ["unshare", "-m", "sh", "-c", f"{mount} && {serve}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stderr
            line = process.stdout.readline()
            assert line, process.stderr.read()
            try:
                answer = requests.get(f"{json.loads(line)['url']}/api/kernels").json()
            finally:
                process.terminate()
        assert [item["id"] for item in answer] == [KERNEL] and not (disk / "index.sqlite").exists()
    # A web page whose own host name resolves to loopback.
    assert requests.get(f"{hub.url}/api/kernels", headers={"Host": "evil.example"}).status_code == 400


def ask(hub: RunningHub, line: str, *, host: str = "127.0.0.1") -> tuple[int, str]:
    """Send a malformed request, and return its status and its response."""
    with socket.create_connection(target(hub.url), timeout=10) as connection:
        connection.sendall(f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("latin-1"))
        answer = b""
        while block := connection.recv(1 << 16):
            answer += block
    return int(answer.split()[1]) if answer else 0, answer.decode("latin-1")


def test_malformed_addresses_are_refused(token_hub: TokenHub) -> None:
    hub, _ = token_hub(ci={"write": ("a",)})
    Hub(Settings(hub.root)).repositories.create("a/one", private=False, author="ci")
    api = "/api/kernels/a/one"
    routes = [f"{api}/{route}" for route in ("revision/{}", "tree/{}/x", "tree/main/{}", "commits/{}")]
    routes += [f"/kernels/a/one/{route}" for route in ("resolve/{}/x", "resolve/main/{}", "commit/{}")]
    for value in ("%00", "main%00x", "%ED%A0%80", "%FF", "a%0Ab", "%7F"):
        for address in ("/api/a{}b", "/api/kernels/a{}/one", "/api/models/a/one/revision/{}", *routes):
            status, answer = ask(hub, f"GET {address.format(value)}")
            assert status == 400 and "x-error-message" in answer.lower(), (address, answer)
    for address in ("/?search=%00", f"{api}?x=a%00b", "/kernels/a/one?version=%00", "/api/kernels?cursor=%00"):
        assert ask(hub, f"GET {address}")[0] == 400, address
    for host in ("[", "a b", "a/b", "x@y", "[::1", "a:99999999", "é"):
        assert ask(hub, "GET /", host=host)[0] == 400, host
    assert ask(hub, "GET /", host="[::1]:80")[0] == 200
    log = hub.log.read_text()
    assert "Traceback" not in log and '"error"' not in log


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_root_is_readable_by_its_user_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for again in (False, True):
            hub = Hub(Settings(tmp_path / "hub"))
            hub.repositories.create(f"a/one{again}", private=True, author="a")
            if not again:  # as an earlier version created them
                (hub.root / "index.sqlite").chmod(0o644)
                (hub.root / "large").chmod(0o755)
                hub.root.chmod(0o755)
    finally:
        os.umask(before)
    paths = (hub.root, *hub.root.rglob("*"))
    modes = {path.relative_to(hub.root).as_posix(): path.stat().st_mode & 0o777 for path in paths}
    assert {modes[name] for name in ("index.sqlite", "secret")} == {0o600}
    with pytest.raises(ConfigError, match="cannot be created: Not a directory"):
        Hub(Settings(hub.root / "index.sqlite/hub"))
    private = ("repositories", "repositories/a/oneFalse.git", "repositories/a/oneTrue.git", "large", ".")
    assert {modes[name] for name in (*private, "incoming")} == {0o700}


def test_concurrent_requests_for_one_name(tmp_path: Path) -> None:
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
    assert not [path for path in (tmp_path / "hub/repositories/a").iterdir() if path.name.startswith(".new-")]


def test_a_read_token_may_only_open_pull_requests(token_hub: TokenHub) -> None:
    readers = {name: {"read": (name,)} for name in ("reader", "other")}
    hub, owner, reader, other = token_hub(owner={"write": ("a",)}, **readers)
    hub.api(owner).create_repo("a/one", repo_type="kernel")
    hub.api(owner).create_repo("a/shut", repo_type="kernel", private=True)

    def propose(token: str | None, path: str, content: bytes, repo_id: str = "a/one", **options: object) -> CommitInfo:
        return commit(hub.api(token), repo_id, path, content, **options)

    large = os.urandom(1_500_000)
    assert propose(reader, "x.so", large, create_pr=True).pr_revision == "refs/pr/1"
    assert propose(other, "y", b"y", create_pr=True).pr_revision == "refs/pr/2"
    propose(reader, "more", b"m", revision="refs/pr/1")  # to its own
    for token, options, message in (
        (reader, {}, "no write scope"),
        (reader, {"revision": "refs/pr/2"}, "no write scope"),
        (None, {"create_pr": True}, "needs a token"),
        (None, {"revision": "refs/pr/1"}, "needs a token"),
    ):
        for content in (b"z", large[1:]):
            with pytest.raises(HfHubHTTPError, match=message):
                propose(token, "z.so", content, **options)
    with pytest.raises(HfHubHTTPError, match="404"):
        propose(reader, "z", b"z", "a/shut", create_pr=True)
    # All other writes are refused.
    head = {"Authorization": f"Bearer {reader}"}
    before = requests.get(f"{hub.url}/api/kernels/a/one/refs?include_prs=1").json()
    for method, path, body in every_route(hub, "a/one"):
        path = path.replace("/discussions/1", "/discussions/2")  # noqa: PLW2901
        read = method in {"get", "head"} or "paths-info" in path or path.endswith(("objects/batch", "validate-yaml"))
        if not read and "/large/" not in path:
            answer = requests.request(method, hub.url + path, json=body, headers=head)
            assert answer.status_code in {400, 401, 403, 404}, (method, path, answer.text)
    assert requests.get(f"{hub.url}/api/kernels/a/one/refs?include_prs=1").json() == before
    # It may delete its own pull requests, and have 32 at a time.
    for _ in range(31):
        propose(reader, os.urandom(4).hex(), b"x", create_pr=True)
    with pytest.raises(HfHubHTTPError, match="32 pull requests"):
        propose(reader, "too-many", b"x", create_pr=True)
    discussions = f"{hub.url}/api/kernels/a/one/discussions"
    assert requests.delete(f"{discussions}/3", headers=head).ok
    (head_of_1,) = [ref["targetCommit"] for ref in before["pullRequests"] if ref["ref"] == "refs/pr/1"]
    merge = {"params": {"commit": head_of_1}, "headers": {"Authorization": f"Bearer {owner}"}}
    assert requests.post(f"{discussions}/1/merge", **merge).ok
    assert hub.api(None).file_exists("a/one", "x.so", repo_type="kernel")
    assert requests.delete(f"{discussions}/2", headers={"Authorization": f"Bearer {owner}"}).ok


def packet(line: bytes) -> bytes:
    return f"{len(line) + 4:04x}".encode() + line


def test_git_serves_objects_of_the_repository_only(hub: RunningHub) -> None:
    """Protocol v2 takes any object that is asked for by its id."""
    for name in ("a/one", "a/other"):
        hub.api().create_repo(name, repo_type="kernel", private=name == "a/other")
    here, other = (pygit2.Repository(str(hub.root / f"repositories/{name}.git")) for name in ("a/one", "a/other"))
    secret = other.create_blob(b"secret")
    who = pygit2.Signature("a", "a@b")
    elsewhere = other.create_commit(None, who, who, "m", other.TreeBuilder().write(), [])
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
    assert b"PACK" in fetch(unreached)  # of this repository, to readers who know its id
    for want in (secret, elsewhere, "0" * 40, "refs/heads/main", "../../other.git", "x" * 60_000):
        assert b"PACK" not in fetch(want), want
    assert requests.get(f"{hub.url}/kernels/a/one/info/refs?service=git-upload-pack").ok
    assert '"level": "error"' not in hub.log.read_text()


SCRIPT = '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(2)</script></svg>'


def test_files_and_pages_run_no_script(hub: RunningHub, api: HfApi) -> None:
    names = ["a.svg", "a.html", "a.xhtml", "a.xml", "a.js", "a.pdf", "a.htm\u00e9", "a;b=c.svg"]
    names += ["quote\"'><script>alert(3)<.svg"]
    lines = [{"key": "header", "value": {"summary": "<script>alert(4)</script>", "description": "</pre><img src=x>"}}]
    lines += [{"key": "file", "value": {"path": name, "content": SCRIPT}} for name in names]
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
    for page in (f"/kernels/{KERNEL}", f"/kernels/{KERNEL}/commit/{done['commitOid']}", "/"):
        answer = requests.get(hub.url + page)
        assert answer.status_code == 200 and "script-src" not in answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for forbidden in ("<script", "onload=", "<svg", "javascript:", '"onerror='):
            assert forbidden not in answer.text.replace("&lt;", ""), (page, forbidden)
    for kept in (f"kernels/{KERNEL}/resolve/main/a.js", f"api/kernels/{KERNEL}", "", "api/kernels/a/none"):
        of_cache = requests.get(f"{hub.url}/{kept}").headers
        assert (of_cache["Cache-Control"], of_cache["Vary"]) == ("private, no-cache", "Authorization, Cookie")
    for page in ("/?search=%3Cscript%3E", "/kernels/%3Cscript%3E/x", "/a/%3Cscript%3E", "/%3Cscript%3E"):
        answer = requests.get(hub.url + page, headers={"Accept": "text/html"})
        assert "<script" not in answer.text


def test_the_addresses_of_models_are_read_only(token_hub: TokenHub, tmp_path: Path) -> None:
    hub, owner = token_hub(ci={"write": ("a", "resolve", "kernels")})
    api = hub.api(owner)
    api.create_repo("a/one", repo_type="kernel")
    api.create_repo("a/shut", repo_type="kernel", private=True)
    for repo_id in ("a/resolve", "resolve/x"):
        api.create_repo(repo_id, repo_type="kernel")
        commit(api, repo_id, "x")
        for kind in ("kernel", None):
            assert api.hf_hub_download(repo_id, "x", repo_type=kind, cache_dir=tmp_path)
        for page in ("", f"/commit/{api.repo_info(repo_id, repo_type='kernel').sha}"):
            assert requests.get(f"{hub.url}/kernels/{repo_id}{page}").ok
    with pytest.raises(HfHubHTTPError, match="'kernels' is an address of the Hub"):
        api.create_repo("kernels/a", repo_type="kernel")

    commit(api, "a/one", "x")
    assert api.model_info("a/one").id == "a/one" and api.file_exists("a/one", "x")
    assert api.list_repo_files("a/one") == ["x"]
    for change in (
        lambda: api.create_commit("a/one", [CommitOperationAdd("x", b"x")], commit_message="m"),
        lambda: api.create_branch("a/one", branch="b"),
        lambda: api.create_repo("a/two"),
        lambda: api.delete_repo("a/one"),
    ):
        with pytest.raises(HfHubHTTPError, match="kernel"):
            change()
    assert not hub.api(None).repo_exists("a/shut") and hub.api(owner).repo_exists("a/shut")
    assert requests.get(f"{hub.url}/api/nothing").status_code == 501


def test_a_reference_names_one_commit(hub: RunningHub, api: HfApi) -> None:
    """Numbers of pull requests and starts of ids can be chosen by others; a merge names the reviewed commit."""
    first = commit(api, "a/one", "good", create_pr=True)
    url = f"{hub.url}/api/kernels/a/one"
    assert requests.delete(f"{url}/discussions/1", headers=TOKEN).ok
    assert '"1"' not in (hub.root / "repositories/a/one.git/config").read_text(), "which each request parses"
    second = commit(api, "a/one", "bad", create_pr=True)
    assert (first.pr_num, second.pr_num) == (1, 2), "numbers are not used again"
    merge = f"{url}/discussions/2/merge"
    moved = commit(api, "a/one", "worse", revision="refs/pr/2")
    for reviewed in ({}, {"commit": second.oid}):
        assert requests.post(merge, params=reviewed, headers=TOKEN).status_code >= 400
    assert requests.post(merge, params={"commit": moved.oid}, headers=TOKEN).ok
    api.create_tag("a/one", tag=moved.oid[:7], revision=first.oid, repo_type="kernel")
    named = {name: api.repo_info("a/one", revision=name, repo_type="kernel").sha for name in (moved.oid[:7], moved.oid)}
    assert list(named.values()) == [first.oid, moved.oid], "a tag wins over the start of an id"
    assert requests.post(f"{url}/tag/main", json={"tag": first.oid}, headers=TOKEN).status_code == 400
    assert requests.get(f"{url}/revision/{moved.oid[:12]}").status_code == 404


def test_bytecode_and_names_that_differ_in_case_only_are_refused(hub: RunningHub, api: HfApi) -> None:
    for path in ("build/torch-cpu/__pycache__/__init__.cpython-311.pyc", "build/torch-cpu/x.PYC", "__PyCache__/x"):
        with pytest.raises(HfHubHTTPError, match="is bytecode"):
            commit(api, "a/one", path)
    with pytest.raises(HfHubHTTPError, match="in case only"):
        api.create_repo("a/One", repo_type="kernel")
    for number in range(4):
        body = [{"name": f"{name}{number}", "organization": "a", "type": "kernel"} for name in ("x", "X") * 2]
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda at: requests.post(f"{hub.url}/api/repos/create", json=at, headers=TOKEN), body)
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    api.create_repo("a/two", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="in case only"):
        api.move_repo("a/two", "a/ONE", repo_type="kernel")
    api.move_repo("a/two", "a/Two", repo_type="kernel")
    api.create_branch("a/one", branch="fix", repo_type="kernel")
    for branch in ("FIX", "Fix/it"):
        with pytest.raises(HfHubHTTPError, match="cannot exist beside"):
            api.create_branch("a/one", branch=branch, repo_type="kernel")
    commit(api, "a/one", "build/x.py")
    for twin in ("build/X.py", "Build/y.py"):
        with pytest.raises(HfHubHTTPError, match="where case does not count"):
            commit(api, "a/one", twin)
    commit(api, "a/one", "\u00e9.py")
    with pytest.raises(HfHubHTTPError, match="form NFC"):
        commit(api, "a/one", "e\u0301.py")
    request = commit(api, "a/one", "docs/a.md", create_pr=True)
    commit(api, "a/one", "Docs/b.md")
    merged = requests.post(
        f"{hub.url}/api/kernels/a/one/discussions/{request.pr_num}/merge", params={"commit": request.oid}, headers=TOKEN
    )
    assert merged.status_code == 400 and "where case does not count" in merged.text


def test_a_damaged_file_of_the_operator_is_no_error_of_the_request(token_hub: TokenHub, tmp_path: Path) -> None:
    hub, token = token_hub(ci={"write": ("a",)})
    file = tmp_path / "tokens.json"
    good = file.read_bytes()
    file.write_text("{")
    for path in ("/health", "/api/kernels"):
        assert requests.get(hub.url + path, headers={"Authorization": f"Bearer {token}"}).status_code == 503
    file.write_bytes(good)
    assert requests.get(f"{hub.url}/health").ok
    with (hub.root / "index.sqlite").open("r+b") as index:
        index.write(b"damaged" * 1000)
    for path in ("/health", "/api/kernels"):
        assert requests.get(hub.url + path, headers={"Authorization": f"Bearer {token}"}).status_code == 503
