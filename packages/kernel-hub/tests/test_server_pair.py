"""Two servers of one root behind one proxy, which alternates between them with every request."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests
from alternating_proxy import alternating_proxy
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from raw_requests import commit, hub_command

from kernel_hub import tokens
from tests.support.running_hub import RunningHub, running_hub
from tests.support.small_kernel import write_kernel
from tests.support.torch_process import run_with_torch


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Callable[..., tuple[str, list[RunningHub]]]]:
    """A function that starts two servers of one root at the same time; it returns their proxy's address, and them."""
    with ExitStack() as started:

        def start(*arguments: str) -> tuple[str, list[RunningHub]]:
            pair: list[RunningHub] = []

            def enter() -> None:
                pair.append(started.enter_context(running_hub(tmp_path, *arguments)))

            threads = [threading.Thread(target=enter) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(pair) == 2
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
    load = "import torch, kernels; print(kernels.get_kernel('a/twice', version=1).twice(torch.ones(1)).item())"
    done = run_with_torch(load, HF_ENDPOINT=url, HF_TOKEN=token, HF_HOME=str(tmp_path / "home"))
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr[-3000:]

    # Each server immediately serves the changes of the other.
    for number in range(6):
        oid = commit(api, "a/twice", "f", str(number).encode()).oid
        assert api.repo_info("a/twice", repo_type="kernel").sha == oid
        listed = requests.get(f"{url}/api/kernels", headers={"Authorization": f"Bearer {token}"}).json()
        assert oid in [item["sha"] for item in listed]
    wanted = commit(api, "a/twice", "pr", create_pr=True)
    merged = requests.post(
        f"{url}/api/kernels/a/twice/discussions/{wanted.pr_num}/merge?commit={wanted.oid}",
        headers={"Authorization": f"Bearer {token}"},
    )
    assert merged.ok and api.file_exists("a/twice", "pr", repo_type="kernel")
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
    failures: list[Exception] = []

    def write(name: str) -> None:
        api = HfApi(endpoint=url, token="any")
        try:
            for number in range(8):
                content = os.urandom(1_100_000) if number % 4 == 0 else os.urandom(9)
                made.append(commit(api, "a/one", f"{name}-{number}{'.bin' if number % 4 == 0 else ''}", content).oid)
        except Exception as error:
            failures.append(error)

    def run() -> None:
        threads = [threading.Thread(target=write, args=[f"{len(made)}-{number}"]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run()
    pair[0].kill()
    run()
    assert not failures and len(set(made)) == 48
    api = HfApi(endpoint=url, token="any")
    history = {item.commit_id for item in api.list_repo_commits("a/one", repo_type="kernel")}
    assert history >= set(made)
    assert json.loads(hub_command("check", "--digests", "--json", "--root", pair[1].root).stdout) == []
