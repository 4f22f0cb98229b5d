"""What a team needs: accounts, tokens with an end and for one repository, and answers in words for what is absent."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from kernel_builder.cli import main
from kernel_hub import tokens
from tests.support.running_hub import RunningHub


def add_file(api: HfApi, repo_id: str, path: str, content: bytes) -> None:
    api.create_commit(repo_id, [CommitOperationAdd(path, content)], commit_message="m", repo_type="kernel")


# Routes of the public client


def test_accounts_and_lists_of_the_public_client(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=("b",), write=("a",))
    reader = tokens.add(file, "desk", read=("a",), write=())
    stranger = tokens.add(file, "stranger", read=(), write=("c",))
    root = tokens.add(file, "root", read=(), write=("*",))
    hub = start_hub("--token-file", str(file), "--repository-quota", "10")
    api = hub.api(writer)
    for repo_id in ("a/one", "a/two", "b/three"):
        hub.api(root).create_repo(repo_id, repo_type="kernel", private=repo_id == "a/two")
    large = os.urandom(1_500_000)
    add_file(api, "a/one", "build/x/table.bin", large)

    stored = {item.id: item for item in api.list_user_repos()}
    assert set(stored) == {"a/one", "a/two"}
    assert stored["a/one"].storage >= len(large) and 15 <= stored["a/one"].storage_percent < 16
    assert stored["a/one"].type == "kernel" and stored["a/two"].visibility == "private"
    assert [item.id for item in hub.api(root).list_user_repos("b")] == ["b/three"]
    assert len(list(hub.api(root).list_user_repos())) == 3
    with pytest.raises(HfHubHTTPError, match="may only read"):
        list(hub.api(reader).list_user_repos("a"))

    assert [user.username for user in api.list_organization_members("a")] == ["ci", "desk", "root"]
    with pytest.raises(HfHubHTTPError, match="has no scope for a"):
        list(hub.api(stranger).list_organization_members("a"))
    overview = api.get_user_overview("desk")
    assert overview.username == "desk" and [org.name for org in overview.orgs] == ["a"]
    with pytest.raises(HfHubHTTPError, match="no token named 'ci'"):
        hub.api(stranger).get_user_overview("ci")
    assert api.get_organization_overview("a").name == "a"
    assert list(api.list_repo_likers("a/one", repo_type="kernel")) == []
    assert list(api.list_user_followers("ci")) == list(api.list_user_following("ci")) == []
    assert list(api.list_organization_followers("a")) == []
    assert api.list_liked_repos().total == 0

    (listed,) = api.list_lfs_files("a/one", repo_type="kernel")
    assert (listed.filename, listed.size, listed.ref) == ("build/x/table.bin", len(large), "refs/heads/main")
    with pytest.raises(HfHubHTTPError, match="may only read a"):
        list(hub.api(reader).list_lfs_files("a/one", repo_type="kernel"))


def test_absent_routes_say_so(hub: RunningHub) -> None:
    api = hub.api()
    api.create_repo("a/one", repo_type="kernel")
    for call, words in (
        (api.list_webhooks, "sends no webhooks"),
        (lambda: api.create_webhook(url="http://x", watched=[]), "sends no webhooks"),
        (lambda: api.unlike("a/one", repo_type="kernel"), "counts no likes"),
        (lambda: list(api.list_collections(owner="a")), "has no collections"),
        (lambda: list(api.list_models()), "holds kernels, and nothing else"),
        (lambda: list(api.list_jobs(namespace="a")), "holds kernels, and nothing else"),
        (api.get_model_tags, "holds kernels, and nothing else"),
    ):
        with pytest.raises(HfHubHTTPError, match=words) as raised:
            call()
        assert raised.value.response.status_code == 501
    assert not api.repo_exists("a/one", repo_type="dataset")
    # Routes that the client itself refuses for kernels today.
    base = f"{hub.url}/api/kernels/a/one"
    for method, path, words in (
        ("GET", "/discussions", "no discussions"),
        ("POST", "/discussions/1/comment", "no discussions"),
        ("POST", "/user-access-request/grant", "gates no repositories"),
        ("POST", "/super-squash/main", "publish to a new branch"),
        ("POST", "/duplicate", "does not copy"),
        ("GET", "/surprise", "has no route GET"),
        ("PATCH", "", "has no route PATCH"),
    ):
        answer = requests.request(method, base + path, json={}, headers={"Authorization": "Bearer any"})
        assert answer.status_code == 501 and words in answer.json()["error"], (path, answer.text)
        assert answer.headers["X-Error-Code"] == "NotSupported"
    assert "no page /nowhere" in requests.get(f"{hub.url}/nowhere").json()["error"]


# Tokens


def test_tokens_for_one_repository_and_tokens_that_end(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    root = tokens.add(file, "root", read=(), write=("*",))
    owner = tokens.add(file, "one", read=("a/shown",), write=("a/one",))
    short = tokens.add(file, "short", read=(), write=("a",), expires=int(time.time()) + 4)
    hub = start_hub("--token-file", str(file))
    for repo_id in ("a/shown", "a/hidden"):
        hub.api(root).create_repo(repo_id, repo_type="kernel", private=True)
    api = hub.api(owner)
    api.create_repo("a/one", repo_type="kernel", private=True)
    large = os.urandom(1_500_000)
    add_file(api, "a/one", "x.bin", large)
    assert [item.id for item in api.list_user_repos()] == ["a/one"]
    headers = {"Authorization": f"Bearer {owner}"}
    listed = requests.get(f"{hub.url}/api/kernels", headers=headers).json()
    assert [item["id"] for item in listed] == ["a/one", "a/shown"]
    assert api.whoami()["orgs"][0]["name"] == "a" and api.whoami()["orgs"][0]["roleInOrg"] == "read"
    assert not api.repo_exists("a/hidden", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="may only read a/shown"):
        add_file(api, "a/shown", "x", b"x")
    with pytest.raises(HfHubHTTPError, match="no write scope for a/new"):
        api.create_repo("a/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError, match="no write scope for a/two"):
        api.move_repo("a/one", "a/two", repo_type="kernel")

    # Parts of Xet uploads: a token for one repository does not reach those of the organisation.
    def xet_address(token: str) -> str:
        url = f"{hub.url}/api/kernels/a/one/xet-write-token/main"
        return str(requests.get(url, headers={"Authorization": f"Bearer {token}"}).json()["casUrl"])

    assert xet_address(owner) != xet_address(root)

    while requests.get(f"{hub.url}/api/whoami-v2", headers={"Authorization": f"Bearer {short}"}).ok:
        time.sleep(0.2)
    with pytest.raises(HfHubHTTPError, match="the token 'short' has expired on 20"):
        hub.api(short).repo_info("a/one", repo_type="kernel")


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    add = ["token", "add", "--token-file", str(file), "--write", "a/one"]
    for end in ("yesterday", "2020-01-01", "0d", "99999d9", "2030-02-31"):
        done = CliRunner().invoke(main, ["hub", *add, "x", "--expires", end])
        assert done.exit_code and "a day to come" in done.output, (end, done.output)
    for scope in ("a/", "/b", "a/b/c", "*/b"):
        done = CliRunner().invoke(main, ["hub", *add, "x", "--write", scope])
        assert done.exit_code and not file.exists(), scope
    assert CliRunner().invoke(main, ["hub", *add, "x", "--expires", "2099-01-01"]).exit_code == 0
    listed = CliRunner().invoke(main, ["hub", "token", "list", "--token-file", str(file)]).output
    assert "a/one: write  until 2099-01-01 00:00 UTC" in listed
    # A file of an earlier version, which has no ends.
    file.write_text(json.dumps({"tokens": [{"name": "old", "sha256": "0" * 64, "scopes": {"a": "read"}}]}))
    assert tokens.TokenFile(file).tokens() == (tokens.Token("old", "0" * 64, {"a": "read"}, None),)


# The audit log


def test_the_audit_log_has_writes_and_denied_accesses(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file, audit = tmp_path / "tokens.json", tmp_path / "audit.log"
    writer = tokens.add(file, "ci", read=(), write=("a",))
    reader = tokens.add(file, "desk", read=("b",), write=())
    hub = start_hub("--token-file", str(file), "--audit-log", str(audit))
    api = hub.api(writer)
    api.create_repo("a/one", repo_type="kernel", private=True)
    done = api.create_commit("a/one", [CommitOperationAdd("x", b"x")], commit_message="m", repo_type="kernel")
    add_file(api, "a/one", "large.bin", os.urandom(1_500_000))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["result"] for line in lines} == {"done"} and {line["who"] for line in lines} == {"ci"}
    assert {line["repository"] for line in lines} == {"a/one"}
    assert [line["what"] for line in lines if line.get("commit") == done.oid] == ["commit"]
    assert {"create_repository", "commit", "receive_shard"} <= {line["what"] for line in lines}
    # logrotate
    audit.rename(tmp_path / "audit.log.1")
    hub.send_signal(signal.SIGHUP)
    while not audit.exists():
        time.sleep(0.05)
    assert not hub.api(reader).repo_exists("a/one", repo_type="kernel")
    assert not hub.api(reader).repo_exists("a/no", repo_type="kernel")
    with pytest.raises(HfHubHTTPError):
        hub.api(reader).create_repo("a/new", repo_type="kernel")
    with pytest.raises(HfHubHTTPError):
        hub.api("hf_unknown").whoami()
    with pytest.raises(HfHubHTTPError):
        api.create_branch("a/one", branch="main", repo_type="kernel")
    api.move_repo("a/one", "a/two", repo_type="kernel")
    api.delete_repo("a/two", repo_type="kernel")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["who"], line.get("repository"), line["result"], line["status"]) for line in lines] == [
        ("desk", "a/one", "denied", 404),
        ("desk", "a/new", "denied", 403),
        (None, None, "denied", 401),
        ("ci", "a/one", "refused", 409),
        ("ci", "a/one to a/two", "done", 200),
        ("ci", "a/two", "done", 200),
    ]
    assert lines[3]["revision"] == "main" and lines[0]["address"] == "127.0.0.1" and lines[0]["time"].endswith("+00:00")
    whole = audit.read_text() + (tmp_path / "audit.log.1").read_text()
    assert not any(secret in whole for secret in (writer, reader, "hf_unknown", "signature", "Bearer"))
    done = CliRunner().invoke(main, ["hub", "serve", "--root", str(tmp_path / "h"), "--audit-log", str(tmp_path)])
    assert done.exit_code and "the audit log cannot be written" in done.output


# git


def git(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["git", "-c", "filter.lfs.smudge=cat", "-c", "filter.lfs.required=false", *arguments]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_git_clones_and_fetches_and_cannot_push(start_hub: Callable[..., RunningHub], tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    writer = tokens.add(file, "ci", read=(), write=("a",))
    other = tokens.add(file, "other", read=(), write=("b",))
    hub = start_hub("--token-file", str(file))
    api = hub.api(writer)
    for repo_id in ("a/open", "a/shut"):
        api.create_repo(repo_id, repo_type="kernel", private=repo_id == "a/shut")
    large = os.urandom(1_500_000)
    add_file(api, "a/open", "table.bin", large)
    for number in range(40):  # more than one round of negotiation, and a request that git compresses
        api.create_tag("a/open", tag=f"t{number}", repo_type="kernel")
    there = f"{hub.url}/kernels/a/open"
    for name, *options in (
        (there, "-q"),
        (f"{there}.git", "-q", "--depth=1"),
        (there, "-q", "-c", "protocol.version=0"),
    ):
        done = git("clone", *options, name, str(tmp_path / f"clone{len(options)}"))
        assert done.returncode == 0, done.stderr
    clone = tmp_path / "clone1"
    sha256 = hashlib.sha256(large).hexdigest()
    assert f"oid sha256:{sha256}" in (clone / "table.bin").read_text()
    add_file(api, "a/open", "later", b"later")
    assert git("pull", "-q", cwd=clone).returncode == 0 and (clone / "later").read_text() == "later"
    assert git("fsck", "--strict", cwd=clone).returncode == 0
    done = git("push", "-q", there, "HEAD:refs/heads/mine", cwd=clone)
    assert done.returncode and "takes no pushes" in done.stderr

    def address(token: str, name: str) -> str:
        return f"{hub.url.replace('//', f'//any:{token}@')}/kernels/a/{name}"

    assert git("clone", "-q", address(writer, "shut"), str(tmp_path / "shut")).returncode == 0
    for name in ("shut", "none"):  # alike for those who may not see it
        done = git("clone", f"{hub.url}/kernels/a/{name}", str(tmp_path / "x"))
        assert done.returncode and "could not read Username" in done.stderr
        done = git("clone", address(other, name), str(tmp_path / "x"))
        assert done.returncode and "no kernel repository" in done.stderr
    # LFS's own client sends the token as a password as well.
    batch = {"operation": "download", "objects": [{"oid": sha256, "size": len(large)}]}
    answer = requests.post(
        f"{there}.git/info/lfs/objects/batch",
        data=json.dumps(batch),
        auth=("any", writer),
        headers={"Content-Type": "application/vnd.git-lfs+json"},
    )
    assert requests.get(answer.json()["objects"][0]["actions"]["download"]["href"]).content == large


def test_what_git_asks_for_has_limits(hub: RunningHub) -> None:
    hub.api().create_repo("a/one", repo_type="kernel")
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
    for _ in range(20):  # no slot is lost
        assert requests.get(f"{url}/info/refs", params={"service": "git-upload-pack"}).ok
