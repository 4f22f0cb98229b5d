"""Who may read and write: tokens, private repositories, read-only servers and host names."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from kernel_format.errors import ConfigError
from kernel_hub import tokens
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel


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
    for token in (None, other):
        with pytest.raises(RepositoryNotFoundError):
            hub.api(token).list_repo_refs("ours/secret", repo_type="kernel")
        assert not hub.api(token).file_exists("ours/secret", "README.md", repo_type="kernel")
    assert "ours/secret" not in requests.get(f"{hub.url}/").text
    settings, known = f"{hub.url}/api/kernels/ours/open/settings", {"Authorization": f"Bearer {writer}"}
    for private in (True, False):  # the clients refuse this for kernels by themselves
        assert requests.put(settings, json={"private": private}, headers=known).ok
        assert hub.api(None).repo_exists("ours/open", repo_type="kernel") is not private

    add = [CommitOperationAdd("a", b"a")]
    for token, message in ((reader, "may only read ours"), (other, "no write scope for ours"), (None, "needs a token")):
        with pytest.raises(HfHubHTTPError, match=message):
            hub.api(token).create_commit("ours/open", add, commit_message="no", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="no write scope for ours"):
        hub.api(other).create_repo("ours/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        hub.api("hf_wrong").whoami()

    # To know the digest of a private file is not enough to read it.
    sha256 = hashlib.sha256((kernel / "build" / VARIANT / "table.bin").read_bytes()).hexdigest()
    hub.api(other).create_repo("theirs/copy", repo_type="kernel")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize 1280000\n".encode()
    with pytest.raises(HfHubHTTPError, match="was not uploaded to theirs/copy"):
        hub.api(other).create_commit(
            "theirs/copy", [CommitOperationAdd("x", pointer)], commit_message="steal", repo_type="kernel"
        )

    tokens.remove(file, "ci")
    with pytest.raises(HfHubHTTPError, match="401"):
        hub.api(writer).create_commit("ours/open", add, commit_message="no", repo_type="kernel")


BODIES = {
    "/branch/{revision}": {},
    "/tag/{revision}": {"tag": "x"},
    "/paths-info/{revision}": {"paths": ["x"]},
    "/preupload/{revision}": {"files": []},
    "/objects/batch": {"operation": "download", "objects": []},
    "/lfs-files/batch": {"deletions": {"sha": []}},
    "/lfs-files/duplicate": {"target": {"type": "kernel", "name": "theirs/x"}, "files": []},
    "/settings": {"private": False},
}


VALUES = {"revision": "main", "path": ".gitattributes", "number": "1", "sha256": "0" * 64}


def test_a_private_repository_is_hidden_on_every_route(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    """Clients without access get the same answers for a private repository as for one that does not exist."""
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=(), write=("ours",))
    stranger = tokens.add(file, "guest", read=(), write=("theirs",))
    hub = start_hub("--token-file", str(file))
    hub.api(writer).create_repo("ours/secret", repo_type="kernel", private=True)
    described = requests.get(f"{hub.url}/openapi.json").json()["paths"]
    routes = [(method, path) for path, methods in described.items() if "{name}" in path for method in methods]
    routes += [("get", f"/kernels/{{organization}}/{{name}}{rest}") for rest in ("", "/commit/main", "/discussions/1")]
    routes += [("get", f"/kernels/{{organization}}/{{name}}.git/{rest}") for rest in ("info/refs", "HEAD")]
    assert len(routes) > 25
    for method, route in routes:
        body = next((body for end, body in BODIES.items() if route.endswith(end)), None)
        query = {"size": 1, "expires": 1, "signature": "x"} if "/large/" in route else {}
        for token in (None, stranger):
            answers = []
            for name in ("secret", "nowhere"):
                path = (
                    route.replace("{organization}", "ours").replace("{name}", name).replace("{revision:path}", "main")
                )
                for key, value in VALUES.items():
                    path = path.replace(f"{{{key}}}", value)
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                got = requests.request(method, hub.url + path, json=body, params=query, headers=headers)
                kept = {key: value for key, value in got.headers.items() if key not in {"date", "x-request-id"}}
                kept.pop("content-length", None)
                shown = {key: value.replace(name, "…") for key, value in kept.items()}
                answers.append((got.status_code, got.text.replace(name, "…"), shown))
            assert answers[0] == answers[1], (method, route)
            assert answers[0][0] == (403 if query else 404), (method, route, answers[0])


def test_a_public_address_needs_tokens() -> None:
    code = "from kernel_builder.cli import main; main()"
    command = [sys.executable, "-c", code, "hub", "serve", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code and "without tokens" in done.stderr


def test_read_only_and_foreign_host_names(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub("--read-only")
    with pytest.raises(HfHubHTTPError, match="read-only"):
        hub.api().create_repo(KERNEL, repo_type="kernel")
    # A web page whose own host name resolves to loopback.
    assert requests.get(f"{hub.url}/api/kernels", headers={"Host": "evil.example"}).status_code == 400
