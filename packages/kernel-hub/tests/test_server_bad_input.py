"""Malformed and hostile requests, and clients that send or read without end: each gets an error with a reason."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import anyio
import psutil
import pytest
import requests
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TOKEN, ask, begin, commit, memory, signed_address, target, until
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kernel_hub.git.objects import LargeFile
from kernel_hub.http.receive import BodyLimits
from kernel_hub.refusals import Refusal, wrong_token
from kernel_hub.settings import RequestLimits
from kernel_hub.tokens import Caller
from tests.support.running_hub import RunningHub, running_hub
from tests.support.small_kernel import KERNEL, publish_kernel, write_kernel

pytestmark = pytest.mark.attack


def test_uploads_cut_at_every_tenth_leave_nothing_behind(hub: RunningHub, api: HfApi) -> None:
    data = os.urandom(3_000_000)
    address = signed_address(hub, data)
    lines = [{"key": "header", "value": {"summary": "cut"}}]
    lines += [{"key": "file", "value": {"path": f"{n}", "content": "x" * 20_000}} for n in range(20)]
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for tenth in range(10):
        begin(address, "PUT", len(data), data[: len(data) * tenth // 10]).close()
        commits = f"{hub.url}/api/kernels/{KERNEL}/commit/main"
        begin(commits, "POST", len(body), body[: len(body) * tenth // 10]).close()
        begin(f"{hub.url}/api/kernels/{KERNEL}/paths-info/main", "POST", 100, b"p" * 10 * tenth).close()
    assert until(lambda: not list((hub.root / "incoming").iterdir()))
    assert not [path for path in hub.root.glob("large*/**/*") if path.is_file()]
    assert len(api.list_repo_commits(KERNEL, repo_type="kernel")) == 1
    assert "error" not in hub.log.read_text()
    assert requests.put(address, data=data).ok
    wrong = requests.put(signed_address(hub, b"announced"), data=b"sent here")
    assert wrong.status_code == 400 and "not the announced" in wrong.text
    assert requests.put(address.replace("size=3000000", "size=3000001"), data=data).status_code == 403
    commit(api, KERNEL, "x.so", data)  # the client does not upload the stored file again


NAMES = ["..", ".", "a..b", "-a", "a--b", "a.git", "a/b", "..%2f..", "a\0b", "é", "x" * 97, "", "CON ", "a\\b"]
PATHS = ["e\u0301", "../x", "a/../../x", "/etc/x", ".git/config", "a/.GIT/x", "a//b", "./a", "a\0b", "a\\b"]
PATHS += ["a\nb", "a\rb", "a\x1b[2J", "a\x85b", "a\u2028b"]
PATHS += ["x" * 300, "d/" * 40, "CON.txt", "lib/nul.so", "C:/x", "CONIN$", "a.", "a /b"]
# Names that some file systems take for .git, and names with invisible characters.
PATHS += ["git~1/x", ".git. /x", ".g\u200cit/x", "\u202egnp.exe", "a\ud800", "a\u00a0b", "a\ufe0f"]
PATHS += [".lfsconfig", "a/.LfsConfig", ".gitmodules"]  # send users' tokens elsewhere
REFS = ["..", "../../x", "refs/heads/../../x", "a..b", "a.lock", "a b"]
REFS += ["a~1", "-a", "x" * 201, "HEAD", "@{0}", "v1^{tree}"]


def test_no_name_leads_out_of_the_root(hub: RunningHub, api: HfApi, tmp_path: Path) -> None:
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


def test_limits_and_malformed_bodies_are_refused_with_reasons(hub: RunningHub, api: HfApi) -> None:
    with pytest.raises(HfHubHTTPError, match=r"a metadata\.json has at most"):
        commit(api, KERNEL, "build/torch-cpu/metadata.json", b" " * 100_000_000)
    large = bytes(2 << 20)
    commit(api, KERNEL, "large.bin", large)
    pointer = LargeFile(hashlib.sha256(large).hexdigest(), len(large)).pointer()
    with pytest.raises(HfHubHTTPError, match=r"a metadata\.json has at most"):
        commit(api, KERNEL, "build/torch-cpu/metadata.json", pointer)
    listed = {"files": [{"path": "x.so", "size": 51 << 30}]}
    refused = requests.post(f"{hub.url}/api/kernels/{KERNEL}/preupload/main", json=listed, headers=TOKEN)
    assert refused.status_code == 413 and "takes files up to" in refused.json()["error"]
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
    v2 = f"{hub.url}/api/kernels/{KERNEL}/branch/v2"
    for start in ("\ud800", "\0", "x" * 30_000):
        answer = requests.post(v2, json={"startingPoint": start}, headers=TOKEN)
        assert answer.status_code == 400 and answer.json()["error"]
    below = requests.post(f"{hub.url}/api/kernels/{KERNEL}/branch/v1%2Ffix", json={}, headers=TOKEN)
    assert below.status_code == 409 and "refs/heads/v1" in below.json()["error"]
    for name in ("v1_0", "v01", "v+1", "v-0"):  # which clients take for the versions 10, 1 and 0
        answer = requests.post(f"{hub.url}/api/kernels/{KERNEL}/branch/{name}", json={}, headers=TOKEN)
        assert answer.status_code == 400 and "read as a version" in answer.json()["error"]
    nonsense = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: nonsense\r\n\r\n"
    for raw in (os.urandom(5000), nonsense, b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000):
        with socket.create_connection(target(hub.url), 60) as connection, suppress(ConnectionError):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100)[:10] in {b"", b"HTTP/1.1 4"}, raw[:100]
    assert requests.get(f"{hub.url}/health").ok


def test_ranges_and_conditions(hub: RunningHub, api: HfApi) -> None:
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


def test_slow_and_large_bodies_are_refused() -> None:
    """A body must be complete in time, and all bodies in memory share a limit."""
    limits = RequestLimits(idle_seconds=0.2, body_seconds=0.5, body_bytes=100, bodies_bytes=450, small_body_bytes=50)
    codes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except Refusal as refusal:
            codes.append(refusal.code)
        else:
            codes.append("read")

    async def send(parts: list[tuple[float, int]], path: str = "/x", address: str = "") -> None:
        await ask(limited, path, body=parts, address=address)

    async def caller_of(request: Request) -> Caller:
        if request.url.path == "/unknown":
            raise wrong_token()
        request.state.caller = request.url.path.strip("/")
        return Caller(request.state.caller)

    limited = BodyLimits(app, limits, caller_of)

    async def ask_all() -> None:
        await send([(0, 60), (0, 0)])
        await send([(0, 60), (1, 0)])  # stalls
        await send([(0.02, 1)] * 45)  # too slow
        await send([(0, 101), (0, 0)])
        await send([(0.02, 101)] * 40 + [(0, 0)], "/api/kernels/a/one/large/x")  # is streamed
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(send, [(0, 90), (0.1, 0)])
                group.start_soon(send, [(0, 90), (0.1, 0)], "/other")  # another caller's
        await send([(0, 90), (0, 0)])
        await send([(0, 90)], "/unknown")
        async with anyio.create_task_group() as group:  # without a token: four addresses, and a fifth
            for size, address in (*((size, f"192.0.2.{n}") for n in range(4) for size in (100, 50, 50)), (90, "::1")):
                group.start_soon(send, [(0, size), (0.1, 0)], "/", address)

    anyio.run(ask_all)
    slow = ["RequestTimeout", "RequestTimeout"]
    last = ["Busy", *["read"] * 6, "InvalidToken", *["read"] * 13]
    assert codes == ["read", *slow, "PayloadTooLarge", "read", *last]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    """A Hub with one kernel, for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("shared")
    with running_hub(directory) as hub:
        publish_kernel(hub, write_kernel(directory / "kernel"))
        yield hub


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def test_no_body_stops_other_requests(shared: RunningHub) -> None:
    """Forms, lists and lines that take long to parse have small limits, or are parsed beside other requests."""
    api = f"{shared.url}/api/kernels/{KERNEL}"
    paths, preupload, commits = (f"{api}/{route}/main" for route in ("paths-info", "preupload", "commit"))
    lists, as_json = b"[" + b"[]," * 340_000 + b"[]]}", {**TOKEN, "Content-Type": "application/json"}
    for url, body, headers, status in (
        (preupload, b'{"files": [], "x": ' + lists, as_json, 413),
        (paths, b'{"paths": ' + lists, as_json, 413),
        (paths, b"%a=%&" * 1_600_000, FORM, 413),
        (paths, b"&a=b" * 200_000, FORM, 400),
        (paths, b"paths=" + b"%E9" * 340_000, FORM, 200),
        (f"{shared.url}/api/repos/create", b'{"name": [' + b"[]," * 100_000, TOKEN, 413),
        (commits, b"\n" * 2_000_000, TOKEN, 413),
    ):
        hub, waits, clients = psutil.Process(shared.process.pid), [0.0], 12 if headers is as_json else 1
        with ThreadPoolExecutor(clients) as others:
            asked = [others.submit(requests.post, url, data=body, headers=headers) for _ in range(clients)]
            while not all(one.done() for one in asked):
                began = sum(hub.cpu_times())
                assert requests.get(f"{shared.url}/health").ok
                waits.append(sum(hub.cpu_times()) - began)
        assert {one.result().status_code for one in asked} == {status}, (url, asked[0].result().text)
        assert max(waits) < 2.5, (url, body[:9], waits)


def test_bodies_that_do_not_arrive_stop_nobody(shared: RunningHub) -> None:
    head = b"POST /api/kernels/me/none/paths-info/main HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(target(shared.url))) for _ in range(32)]
        for connection in slow:
            connection.sendall(head)
        time.sleep(0.5)
        assert requests.get(f"{shared.url}/api/kernels/{KERNEL}", timeout=5).ok
        slow[0].sendall(b" " * 99)
        assert slow[0].recv(100).startswith(b"HTTP/1.1 4")


POST = b"POST /api/validate-yaml HTTP/1.1\r\nHost: localhost\r\n"
# The route reads the body: another one may answer before the flood is refused.
CHUNKED = POST.replace(b"validate-yaml", b"kernels/me/none/paths-info/main") + b"Transfer-Encoding: chunked\r\n\r\n"

FLOODS = {  # the start of a request, and the bytes that follow it again and again
    "lines": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X: y\r\n" * 10_000),
    "a line": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"y" * 60_000),
    "an address": (b"GET /", b"y" * 60_000),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 10_000),
    "a chunk's extension": (CHUNKED + b"1;x=", b"y" * 60_000),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_endless_heads_are_refused_early(shared: RunningHub, flood: str) -> None:
    start, more = FLOODS[flood]
    before, sent = memory(shared), 0
    with socket.create_connection(target(shared.url)) as connection:
        connection.settimeout(60)
        with suppress(OSError):
            connection.sendall(start)
            while sent < 100_000_000:
                connection.sendall(more)
                sent += len(more)
        with suppress(ConnectionResetError):  # the response is lost if the client was still sending
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
    assert sent < 20_000_000
    assert memory(shared) - before < 10


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n Folded: y\r\nX : y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nAuthorization: Bearer y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-User: x\r\nx-forwarded-user: y\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(shared: RunningHub, head: bytes) -> None:
    """A proxy may read them differently: a second request could be smuggled through it."""
    with socket.create_connection(target(shared.url)) as connection:
        connection.settimeout(60)
        connection.sendall(head + b"GET /api/whoami-v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), answer
        assert answer.count(b"HTTP/1.1 ") == 1
