"""Malformed and hostile requests: each gets an error with a reason, and the Hub keeps running."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
import requests
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TOKEN, begin, commit, target, until, upload_address

from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL

pytestmark = pytest.mark.attack


def test_uploads_cut_at_every_tenth_leave_nothing_behind(hub: RunningHub) -> None:
    hub.api().create_repo(KERNEL, repo_type="kernel")
    data = os.urandom(3_000_000)
    address = upload_address(hub, data)
    lines = [{"key": "header", "value": {"summary": "cut"}}]
    lines += [
        {"key": "file", "value": {"path": f"{n}", "content": "x" * 20_000, "encoding": "utf-8"}} for n in range(20)
    ]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for tenth in range(10):
        begin(address, "PUT", len(data), data[: len(data) * tenth // 10]).close()
        commits = f"{hub.url}/api/kernels/{KERNEL}/commit/main"
        begin(commits, "POST", len(body), body[: len(body) * tenth // 10]).close()
        begin(f"{hub.url}/api/kernels/{KERNEL}/paths-info/main", "POST", 100, b"p" * 10 * tenth).close()
    assert until(lambda: not list((hub.root / "incoming").iterdir()))
    assert not [path for path in hub.root.glob("large*/**/*") if path.is_file()]
    assert len(hub.api().list_repo_commits(KERNEL, repo_type="kernel")) == 1
    assert "error" not in hub.log.read_text()
    assert requests.put(address, data=data).ok
    wrong = requests.put(upload_address(hub, b"announced"), data=b"sent here")
    assert wrong.status_code == 400 and "not the announced" in wrong.text
    assert requests.put(address.replace("size=3000000", "size=3000001"), data=data).status_code == 403
    commit(hub.api(), KERNEL, "x.so", data)  # the client does not upload the stored file again


NAMES = ["..", ".", "a..b", "-a", "a--b", "a.git", "a/b", "..%2f..", "a\0b", "é", "x" * 97, "", "CON ", "a\\b"]
PATHS = [
    "e\u0301",
    "../x",
    "a/../../x",
    "/etc/x",
    ".git/config",
    "a/.GIT/x",
    "a//b",
    "./a",
    "a\0b",
    "a\\b",
    "x" * 300,
    "d/" * 40,
]
PATHS += ["CON.txt", "lib/nul.so", "C:/x", "CONIN$", "a.", "a /b"]
# Names that some file systems take for .git, and names with invisible characters.
PATHS += ["git~1/x", ".git. /x", ".g\u200cit/x", "\u202egnp.exe", "a\ud800", "a\u00a0b", "a\ufe0f"]
REFS = [
    "..",
    "../../x",
    "refs/heads/../../x",
    "a..b",
    "a.lock",
    "a b",
    "a~1",
    "-a",
    "x" * 201,
    "HEAD",
    "@{0}",
    "v1^{tree}",
]


def test_no_name_leads_out_of_the_root(hub: RunningHub, tmp_path: Path) -> None:
    hub.api().create_repo(KERNEL, repo_type="kernel")

    def all_files() -> set[str]:
        return {str(path) for path in tmp_path.rglob("*") if "lock" not in path.name and "/objects/" not in str(path)}

    before = all_files()
    for name in NAMES:
        for body in ({"name": name, "organization": "ours"}, {"name": "x", "organization": name}):
            answer = requests.post(f"{hub.url}/api/repos/create", json={**body, "type": "kernel"}, headers=TOKEN)
            assert answer.status_code == 400 or (not name and body["organization"] == ""), (name, answer.text)
            requests.delete(f"{hub.url}/api/repos/delete", json={**body, "type": "kernel"}, headers=TOKEN)
    requests.delete(f"{hub.url}/api/repos/delete", json={"name": "x", "type": "kernel"}, headers=TOKEN)
    (tmp_path / "hub/repositories/user").rmdir()  # without an organization, the caller's own is used
    api = f"{hub.url}/api/kernels/{KERNEL}"
    for path in PATHS:
        for line in (
            {"key": "file", "value": {"path": path, "content": "x"}},
            {"key": "deletedFile", "value": {"path": path}},
            {"key": "lfsFile", "value": {"path": path, "oid": "0" * 64, "algo": "sha256", "size": 1}},
        ):
            lines = json.dumps({"key": "header", "value": {"summary": "s"}}) + "\n" + json.dumps(line)
            answer = requests.post(f"{api}/commit/main", data=lines, headers=TOKEN)
            assert answer.status_code in {400, 404}, (path, answer.text)
        inside = quote(path, safe="", errors="replace")
        assert requests.get(f"{hub.url}/kernels/{KERNEL}/resolve/main/{inside}").status_code in {400, 404}
    for ref in REFS:
        branch = requests.post(f"{api}/branch/{quote(ref, safe='')}", json={}, headers=TOKEN)
        assert branch.status_code == 400 or ref == "..", ref  # the client removes `..` from the address
        assert requests.post(f"{api}/tag/main", json={"tag": ref}, headers=TOKEN).status_code == 400, ref
        assert requests.get(f"{api}/revision/{quote(ref, safe='')}").status_code == 404 or ref == "..", ref
    assert all_files() == before


LONG_FILE = b'{"key": "file", "value": {"content": "eHh4", "path": "metadata.json", "encoding": "base64"}}'


def test_limits_and_malformed_bodies_are_refused_with_reasons(hub: RunningHub) -> None:
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")

    with pytest.raises(HfHubHTTPError, match=r"a metadata\.json has at most"):
        commit(api, KERNEL, "build/torch-cpu/metadata.json", b" " * 100_000_000)
    large = {"files": [{"path": "x.so", "size": 51 << 30}]}
    refused = requests.post(f"{hub.url}/api/kernels/{KERNEL}/preupload/main", json=large, headers=TOKEN)
    assert refused.status_code == 413 and "takes files up to" in refused.json()["error"]
    with pytest.raises(HfHubHTTPError, match="both a file and a folder"):
        api.create_commit(
            KERNEL,
            [CommitOperationAdd("a", b"a"), CommitOperationAdd("a/b", b"b")],
            commit_message="m",
            repo_type="kernel",
        )
    with pytest.raises(HfHubHTTPError, match="holds kernels"):
        api.create_repo(KERNEL, repo_type="model")
    commits = f"{hub.url}/api/kernels/{KERNEL}/commit/main"
    header = b'{"key": "header", "value": {"summary": "s"}}\n'
    for body, status in (
        (b"[" * 100_000, 413),
        (b'{"key": "file"}\n', 400),
        (header + b'{"key": "file", "value": {"path": "a", "content": "?", "encoding": "base64"}}\n', 400),
        (b'{"key": "header", "value": {"summary": "\\ud800"}}', 400),
        (b'{"key": "header", "value": {"summary": "' + b"s" * 30_000 + b'"}}', 400),
        (header + b'{"key": "rename", "value": {"path": "a"}}\n', 400),
        (header + b'{"key": "file", "value": {"path": "a", "text": "' + b"x" * 20_000_000, 413),
        (header + b'{"key": "file", "value": {"path": "a", "content": "' + b"eHh4" * 100_000 + b'"}}', 400),
        (header + LONG_FILE.replace(b"eHh4", b"eHh4" * 600_000), 413),
        (header + LONG_FILE.replace(b"eHh4", b"eHh4" * 200_000), 200),
    ):
        answer = requests.post(commits, data=body, headers=TOKEN)
        assert answer.status_code == status and (status == 200 or answer.json()["error"]), (body[:60], answer.text)
    assert requests.post(f"{hub.url}/api/repos/create", data=b" " * 9_000_000, headers=TOKEN).status_code == 413
    hidden = {"name": "x", "organization": "ours", "type": "kernel", "visibility": "protected"}
    assert requests.post(f"{hub.url}/api/repos/create", json=hidden, headers=TOKEN).status_code == 400
    assert requests.post(f"{hub.url}/api/kernels/{KERNEL}/branch/v1", json={}, headers=TOKEN).ok
    for start in ("\ud800", "\0", "x" * 30_000):
        answer = requests.post(
            f"{hub.url}/api/kernels/{KERNEL}/branch/v2", json={"startingPoint": start}, headers=TOKEN
        )
        assert answer.status_code == 400 and answer.json()["error"]
    below = requests.post(f"{hub.url}/api/kernels/{KERNEL}/branch/v1%2Ffix", json={}, headers=TOKEN)
    assert below.status_code == 409 and "refs/heads/v1" in below.json()["error"]
    for raw in (
        os.urandom(5000),
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ):
        with socket.create_connection(target(hub.url)) as connection:
            connection.sendall(raw)
    with socket.create_connection(target(hub.url)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000)
    assert requests.get(f"{hub.url}/health").ok


def test_ranges_and_conditions(hub: RunningHub) -> None:
    api = hub.api()
    api.create_repo(KERNEL, repo_type="kernel")
    large = os.urandom(2_500_000)
    files = [CommitOperationAdd("large.so", large), CommitOperationAdd("small", b"0123456789")]
    api.create_commit(KERNEL, files, commit_message="m", repo_type="kernel")
    for path, data in (("large.so", large), ("small", b"0123456789")):
        url = f"{hub.url}/kernels/{KERNEL}/resolve/main/{path}"
        whole = requests.get(url)
        assert whole.content == data and whole.headers["X-Linked-Size"] == str(len(data))
        for wanted, expected in (("0-0", data[:1]), ("5-", data[5:]), ("-3", data[-3:]), ("2-99999999", data[2:])):
            part = requests.get(url, headers={"Range": f"bytes={wanted}"})
            assert (part.status_code, part.content) == (206, expected)
        assert requests.get(url, headers={"Range": f"bytes={len(data)}-"}).status_code == 416
        assert requests.get(url, headers={"Range": "bytes=1-0, 4-9"}).status_code == 200
        assert requests.get(url, headers={"If-None-Match": whole.headers["ETag"]}).status_code == 304
        assert requests.get(url, headers={"Range": "bytes=1-2", "If-Range": '"other"'}).content == data
        head = requests.head(url)
        assert head.headers["Content-Length"] == str(len(data)) and not head.content
