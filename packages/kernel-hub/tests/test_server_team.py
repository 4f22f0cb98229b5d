"""Accounts, token files, absent routes, the audit log and clones."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import requests
from click.testing import CliRunner
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import TokenHub, commit, signed_address, target, until

from kernel_format.errors import ConfigError
from kernel_hub import tokens
from kernel_hub.commands import main
from kernel_hub.git.refs import MOST_REFS
from kernel_hub.routes.git import SPARE_SECONDS
from tests.support.cli import expect, invoke
from tests.support.running_hub import RunningHub


def test_accounts_of_the_public_client(token_hub: TokenHub) -> None:
    hub, writer, root = token_hub("--trust", "t", ci={"read": ("b",), "write": ("a",)}, root={"write": ("*",)})
    for repo_id in ("a/one", "a/two"):
        hub.api(root).create_repo(repo_id, repo_type="kernel", private=repo_id == "a/two")
    roles = {org["name"]: org["roleInOrg"] for org in hub.api(writer).whoami()["orgs"]}
    assert roles == {"a": "write", "b": "read"} and hub.api(writer).whoami()["auth"]["accessToken"]["role"] == "write"
    assert {org["name"] for org in hub.api(root).whoami()["orgs"]} == {"a", "t"}
    assert hub.api(root).whoami(cache=False)["auth"]["accessToken"]["role"] == "admin"
    overview = requests.get(f"{hub.url}/api/organizations/a/overview").json()
    assert (overview["numKernels"], overview["trustedKernelPublisher"]) == (1, False)
    assert requests.get(f"{hub.url}/api/organizations/t/overview").json()["trustedKernelPublisher"]
    assert requests.get(f"{hub.url}/api/organizations/none/overview").status_code == 404


def test_absent_routes_report_the_reason(hub: RunningHub, api: HfApi) -> None:
    for call, message in (
        (api.list_webhooks, "has no route GET /api/settings/webhooks"),
        (lambda: list(api.list_models()), "holds kernels only"),
    ):
        with pytest.raises(HfHubHTTPError, match=message) as raised:
            call()
        assert raised.value.response.status_code == 501
    assert not api.repo_exists("a/one", repo_type="dataset")
    base = f"{hub.url}/api/kernels/a/one"
    for method, path, message in (
        ("GET", "/discussions", "has no route GET"),
        ("GET", "/xet-write-token/main", "HF_HUB_DISABLE_XET=1"),
        ("GET", "/surprise", "has no route GET"),
        ("PATCH", "", "has no route PATCH"),
    ):
        answer = requests.request(method, base + path, json={}, headers={"Authorization": "Bearer any"})
        assert answer.status_code == 501 and message in answer.json()["error"], (path, answer.text)
        assert answer.headers["X-Error-Code"] == "NotSupported"
    assert "no page /nowhere" in requests.get(f"{hub.url}/nowhere").json()["error"]


# Tokens


def test_tokens_for_one_repository_and_with_an_end(token_hub: TokenHub) -> None:
    of_one = {"read": ("a/shown",), "write": ("a/one",)}
    ending = {"write": ("a",), "expires": int(time.time()) + 2}
    hub, root, owner, short = token_hub(root={"write": ("*",)}, one=of_one, short=ending)
    for repo_id in ("a/shown", "a/hidden"):
        hub.api(root).create_repo(repo_id, repo_type="kernel", private=True)
    api = hub.api(owner)
    api.create_repo("a/one", repo_type="kernel", private=True)
    large = os.urandom(1_500_000)
    commit(api, "a/one", "x.bin", large)
    headers = {"Authorization": f"Bearer {owner}"}
    listed = requests.get(f"{hub.url}/api/kernels", headers=headers).json()
    assert [item["id"] for item in listed] == ["a/one", "a/shown"]
    assert api.whoami()["orgs"][0]["name"] == "a" and api.whoami()["orgs"][0]["roleInOrg"] == "read"
    assert not api.repo_exists("a/hidden", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="may only read a/shown"):
        commit(api, "a/shown", "x", b"x")
    with pytest.raises(HfHubHTTPError, match="no write scope for a/new"):
        api.create_repo("a/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="no write scope for a/two"):
        api.move_repo("a/one", "a/two", repo_type="kernel")

    while requests.get(f"{hub.url}/api/whoami-v2", headers={"Authorization": f"Bearer {short}"}).ok:
        time.sleep(0.2)
    with pytest.raises(HfHubHTTPError, match="the token 'short' has expired on 20"):
        hub.api(short).repo_info("a/one", repo_type="kernel")


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    add = ["token", "add", "--token-file", str(file), "--write", "a/one"]
    for end in ("yesterday", "2020-01-01", "0d", "99999d9", "2030-02-31"):
        expect(2, "a day to come", "hub", *add, "x", "--expires", end)
    for scope in ("a/", "/b", "a/b/c", "*/b"):
        assert invoke("hub", *add, "x", "--write", scope).exit_code and not file.exists(), scope
    expect(0, "", "hub", *add, "x", "--expires", "2099-01-01")
    expect(0, "a/one: write  until 2099-01-01 00:00 UTC", "hub", "token", "list", "--token-file", file)
    for pair in ("team", "=team", " =*"):
        with pytest.raises(ConfigError, match="expected GROUP=ORG"):
            tokens.add(file, "proxy", read=(), write=(), groups=(pair,))

    # A file of an earlier version, which has no ends.
    file.write_text(json.dumps({"tokens": [{"name": "old", "sha256": "0" * 64, "scopes": {"a": "read"}}]}))
    assert tokens.TokenFile(file).tokens() == (tokens.Token(name="old", sha256="0" * 64, scopes={"a": "read"}),)


@pytest.mark.attack
def test_only_the_proxy_names_users(token_hub: TokenHub, tmp_path: Path) -> None:
    file, groups = tmp_path / "tokens.json", ("team=a", "team=c", "staff=*")
    hub, owner, proxy = token_hub(owner={"write": ("a", "b")}, proxy={"groups": groups})
    for repo_id in ("a/one", "b/two"):
        hub.api(owner).create_repo(repo_id, repo_type="kernel", private=True)

    def ask(token: str | None, user: str, groups: str, method: str = "GET", **headers: str) -> requests.Response:
        named = {"X-Forwarded-User": user, "X-Forwarded-Groups": groups, **headers}
        secret = {} if token is None else {"X-Hub-Proxy-Token": token}
        return requests.request(method, f"{hub.url}/api/kernels", headers={**named, **secret})

    def listed(*arguments: str | None) -> list[str]:
        return [item["id"] for item in ask(*arguments).json()]  # type: ignore[arg-type]

    assert listed(proxy, "ann@example.org", "x, team") == ["a/one"]
    assert listed(proxy, "ann@example.org", "staff") == ["a/one", "b/two"]
    assert listed(proxy, "", "staff") == listed(proxy, "ann@example.org", "") == listed(None, "ann", "staff") == []
    for token in (owner, "hf_guessed", ""):  # a token of a client is none of a proxy
        assert ask(token, "ann", "staff").status_code == 401
    assert ask(None, "", "", Authorization=f"Bearer {proxy}").status_code == 401  # and the other way round
    assert ask(proxy, "ann", "staff", Authorization="Bearer hf_guessed").status_code == 401
    new = {"name": "new", "organization": "a", "type": "kernel"}
    headers = {"X-Hub-Proxy-Token": proxy, "X-Forwarded-User": "ann", "X-Forwarded-Groups": "staff"}
    hub.api(owner).create_repo("a/open", repo_type="kernel")
    for repo_id, status in (("a/open", 200), ("a/one", 404)):  # for a client without a session
        paths = f"{hub.url}/api/kernels/{repo_id}/paths-info/main"
        answer = requests.post(paths, data={"paths": ["x"]}, headers={"X-Hub-Proxy-Token": proxy})
        assert answer.status_code == status
    for user, reason in (("", "token"), ("ann", "only read")):
        forged = requests.post(f"{hub.url}/api/repos/create", json=new, headers={**headers, "X-Forwarded-User": user})
        assert forged.status_code == 401 and reason in forged.json()["error"]
    page = requests.get(hub.url, headers=headers).text
    assert '<span id="user">ann</span>' in page and "/logout" in page and 'href="/login"' not in page
    tokens.remove(file, "proxy")
    assert ask(proxy, "ann@example.org", "team").status_code == 401
    with pytest.raises(ConfigError, match="a scope, or the token of a proxy groups"):
        tokens.add(file, "both", read=("a",), write=(), groups=("team=a",))


def test_metrics_of_the_storage(start_hub: Callable[..., RunningHub]) -> None:
    hub = start_hub("--quota", "5")
    hub.api().create_repo("a/one", repo_type="kernel")
    commit(hub.api(), "a/one", "large.bin", os.urandom(1_500_000))
    metrics = dict(re.findall(r"(?m)^(hub_\w+) (\S+)$", requests.get(f"{hub.url}/metrics").text))
    assert 1_500_000 < float(metrics["hub_stored_bytes"]) < 1_600_000
    assert float(metrics["hub_quota_bytes"]) == 5_000_000 and float(metrics["hub_disk_free_bytes"]) > 0
    assert float(metrics["hub_requests_waiting"]) == 0


@pytest.mark.attack
def test_invented_methods_take_no_memory(hub: RunningHub) -> None:
    for number in range(3):
        assert requests.request(f"M{number}" + "X" * 1000, hub.url).status_code == 404
    text = requests.get(f"{hub.url}/metrics").text
    assert "M0X" not in text and re.search(r'hub_requests_total{method="other".* 3[.]0', text)
    assert "X" * 100 not in hub.log.read_text()


# The audit log


@pytest.mark.attack
def test_the_audit_log_has_writes_and_denied_accesses(token_hub: TokenHub, tmp_path: Path) -> None:
    audit = tmp_path / "audit.log"
    hub, writer, reader = token_hub("--audit-log", str(audit), ci={"write": ("a",)}, desk={"read": ("b",)})
    api = hub.api(writer)
    api.create_repo("a/one", repo_type="kernel", private=True)
    done = commit(api, "a/one", "x")
    commit(api, "a/one", "large.bin", os.urandom(1_500_000))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["result"] for line in lines} == {"done"} and {line["who"] for line in lines} == {"ci"}
    assert {line["repository"] for line in lines} == {"a/one"}
    assert [line["what"] for line in lines if line.get("commit") == done.oid] == ["commit"]
    assert {"create_repository", "commit"} <= {line["what"] for line in lines}
    # As logrotate does.
    assert audit.stat().st_mode & 0o077 == 0
    audit.rename(tmp_path / "audit.log.1")
    assert not hub.api(reader).repo_exists("a/one", repo_type="kernel")
    assert not hub.api(reader).repo_exists("a/no", repo_type="kernel")
    with pytest.raises(HfHubHTTPError):
        hub.api(reader).create_repo("a/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError):
        hub.api("hf_unknown").whoami()
    with pytest.raises(HfHubHTTPError):
        api.create_branch("a/one", branch="main", repo_type="kernel")
    api.move_repo("a/one", "a/preupload", repo_type="kernel")
    api.create_branch("a/preupload", branch="git-upload-pack", repo_type="kernel")  # names of routes that only read
    api.delete_repo("a/preupload", repo_type="kernel")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["who"], line.get("repository"), line["result"], line["status"]) for line in lines] == [
        ("desk", "a/one", "denied", 404),
        ("desk", "a/no", "denied", 404),  # the same work as for a private repository
        ("desk", "a/new", "denied", 403),
        (None, None, "denied", 401),
        ("ci", "a/one", "refused", 409),
        ("ci", "a/one to a/preupload", "done", 200),
        ("ci", "a/preupload", "done", 200),
        ("ci", "a/preupload", "done", 200),
    ]
    assert lines[4]["revision"] == "main" and lines[0]["address"] == "127.0.0.1" and lines[0]["time"].endswith("+00:00")
    whole = audit.read_text() + (tmp_path / "audit.log.1").read_text()
    assert not any(secret in whole for secret in (writer, reader, "hf_unknown", "signature", "Bearer"))
    command = ["hub", "serve", "--root", tmp_path / "h", "--audit-log", tmp_path]
    expect(2, "the audit log cannot be written", *command)
    done = CliRunner().invoke(main, ["token", "add", "ci", "--write", "a", "--token-file", f"{audit}/x/tokens.json"])
    assert done.exit_code == 1 and "hint: free some space, change the permissions" in done.output


# git


def git(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["git", "-c", "filter.lfs.smudge=cat", "-c", "filter.lfs.required=false", *arguments]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_git_clones_and_fetches_and_cannot_push(token_hub: TokenHub, tmp_path: Path) -> None:
    hub, writer, other = token_hub(ci={"write": ("a",)}, other={"write": ("b",)})
    api = hub.api(writer)
    for repo_id in ("a/open", "a/shut"):
        api.create_repo(repo_id, repo_type="kernel", private=repo_id == "a/shut")
    large = os.urandom(1_500_000)
    commit(api, "a/open", "table.bin", large)
    for number in range(40):  # more than one round of negotiation, and a request that git compresses
        api.create_tag("a/open", tag=f"t{number}", repo_type="kernel")
    there = f"{hub.url}/kernels/a/open"
    old = (there, "-q", "-c", "protocol.version=0")
    for name, *options in ((there, "-q"), (f"{there}.git", "-q", "--depth=1"), old):
        done = git("clone", *options, name, str(tmp_path / f"clone{len(options)}"))
        assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone1"
    sha256 = hashlib.sha256(large).hexdigest()
    assert f"oid sha256:{sha256}" in (clone / "table.bin").read_text()
    commit(api, "a/open", "later", b"later")
    assert git("pull", "-q", cwd=clone).returncode == 0 and (clone / "later").read_text() == "later"
    assert git("fsck", "--strict", cwd=clone).returncode == 0
    done = git("push", "-q", there, "HEAD:refs/heads/mine", cwd=clone)
    assert done.returncode and "does not accept pushes" in done.stderr

    def address(token: str, name: str) -> str:
        return f"{hub.url.replace('//', f'//any:{token}@')}/kernels/a/{name}"

    assert git("clone", "-q", address(writer, "shut"), str(tmp_path / "shut")).returncode == 0
    for name in ("shut", "none"):  # alike for those who may not see it
        done = git("clone", f"{hub.url}/kernels/a/{name}", str(tmp_path / "x"))
        assert done.returncode and "could not read Username" in done.stderr
        done = git("clone", address(other, name), str(tmp_path / "x"))
        assert done.returncode and "no kernel repository" in done.stderr
    address_of_large = signed_address(hub, large, "download", repo_id="a/open", token=writer)
    assert requests.get(address_of_large).content == large


@pytest.mark.attack
def test_slow_clones_do_not_stop_others(token_hub: TokenHub, tmp_path: Path) -> None:
    hub, token, foreign = token_hub(ci={"write": ("a",)}, foreign={"read": ("b",)})
    for repo_id in ("a/open", "a/shut"):
        hub.api(token).create_repo(repo_id, repo_type="kernel", private=repo_id == "a/shut")
    for number in range(20):
        head = commit(hub.api(token), "a/open", f"{number}.txt", os.urandom(450_000).hex().encode()).oid
    body = f"0032want {head}\n00000009done\n".encode()
    kind = "application/x-git-upload-pack-request"
    with ExitStack() as opened:
        for sent in ("", f"Authorization: Bearer {foreign}\r\n") * 8:
            connection = socket.create_connection(target(hub.url), source_address=("127.0.0.2", 0))
            opened.enter_context(connection).sendall(
                f"POST /kernels/a/open/git-upload-pack HTTP/1.1\r\nHost: {target(hub.url)[0]}\r\n{sent}"
                f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
        time.sleep(1)
        served = psutil.Process(hub.process.pid)
        assert until(lambda: [git.nice() for git in served.children()] == [19] * 4)
        for name in ("shut", "open"):  # git sends no token unless it is asked for one
            address = f"{hub.url.replace('//', f'//any:{token}@')}/kernels/a/{name}"
            assert git("ls-remote", address).returncode == 0
        began = time.monotonic()
        for header in (f"http.extraHeader=Authorization: Bearer {token}", "http.extraHeader="):
            to = str(tmp_path / f"clone{len(header)}")
            assert git("-c", header, "clone", f"{hub.url}/kernels/a/open", to).returncode == 0
        assert time.monotonic() - began < SPARE_SECONDS, "the slow clones have not ended before"


@pytest.mark.attack
def test_requests_of_git_have_limits(hub: RunningHub, api: HfApi) -> None:
    url = f"{hub.url}/kernels/a/one"
    assert requests.get(f"{url}/info/refs").status_code == 400
    kind = {"Content-Type": "application/x-git-upload-pack-request"}
    packed = {**kind, "Content-Encoding": "gzip"}
    assert requests.post(f"{url}/git-upload-pack", data=b"x").status_code == 400
    assert requests.post(f"{url}/git-upload-pack", data=b"x", headers=packed).status_code == 400
    bomb = gzip.compress(bytes(50 << 20))
    assert requests.post(f"{url}/git-upload-pack", data=bomb, headers=packed).status_code == 413
    hostile = requests.post(f"{url}/git-upload-pack", data=b"fffe" + b"x" * 100, headers=kind)
    assert hostile.status_code == 200 and len(hostile.content) < 200
    listing = b"0014command=ls-refs\n0001" + b"001bref-prefix refs/tags/t\n" * 1001 + b"0000"
    refused = requests.post(f"{url}/git-upload-pack", data=listing, headers={**kind, "Git-Protocol": "version=2"})
    assert refused.status_code == 413 and "prefixes" in refused.text
    head = api.repo_info("a/one", repo_type="kernel").sha
    lines = "".join(f"{head} refs/tags/t{number}\n" for number in range(MOST_REFS - 2))
    (hub.root / "repositories/a/one.git/packed-refs").write_text(lines)
    api.create_tag("a/one", tag="u", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="5000 branches, tags and pull requests"):
        api.create_tag("a/one", tag="v", repo_type="kernel")
    for _ in range(20):  # no slot is lost
        assert requests.get(f"{url}/info/refs", params={"service": "git-upload-pack"}).ok
