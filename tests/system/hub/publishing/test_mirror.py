"""A read-through mirror. Another instance of the server plays the public Hub."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from kernel_builder.cli import main
from kernel_builder.hub.signing import sign
from kernel_hub import mend
from kernel_hub.hub_service import Hub
from kernel_hub.settings import Settings
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL, VARIANT, publish_kernel, write_kernel
from tests.support.torch_process import run_with_torch

from . import sigstore_instance
from .test_sign import OURS, TRUSTED

TABLE = f"build/{VARIANT}/table.bin"


@pytest.fixture
def start_mirror(start_hub: Callable[..., RunningHub], tmp_path: Path) -> Callable[..., RunningHub]:
    """A function that starts a mirror of a Hub for the organisation `kernels-community`."""

    def start(upstream: RunningHub, *options: str, **environment: str) -> RunningHub:
        arguments = ["--mirror", upstream.url, "--mirror-organization", "kernels-community", *options]
        return start_hub("--trust", "kernels-community", *arguments, root=tmp_path / "mirror", **environment)

    return start


def load(hub: RunningHub, home: Path) -> str:
    code = f"import torch, kernels; print(kernels.get_kernel('{KERNEL}', version=1).twice(torch.ones(1)).item())"
    done = run_with_torch(code, **{**hub.environment, "HF_HOME": str(home)})
    return done.stdout or done.stderr


def test_a_kernel_is_copied_when_it_is_loaded_and_served_without_the_other_hub(
    start_hub: Callable[..., RunningHub], start_mirror: Callable[..., RunningHub], tmp_path: Path
) -> None:
    upstream = start_hub(root=tmp_path / "upstream")
    first = publish_kernel(upstream, write_kernel(tmp_path / "one"))
    publish_kernel(upstream, write_kernel(tmp_path / "other", repo_id="strangers/twice"), repo_id="strangers/twice")
    upstream.api().create_tag(KERNEL, tag="v1.0", tag_message="m", revision="v1", repo_type="kernel")
    large = os.urandom(40_000_000)
    added = [CommitOperationAdd("large.bin", large), CommitOperationAdd("never-read.bin", os.urandom(1_200_000))]
    upstream.api().create_commit(KERNEL, added, commit_message="m", repo_type="kernel")

    mirror = start_mirror(upstream, "--mirror-refresh", "1")
    api = mirror.api()
    assert load(mirror, tmp_path / "home") == "2.0\n"
    assert api.list_repo_refs(KERNEL, repo_type="kernel") == upstream.api().list_repo_refs(KERNEL, repo_type="kernel")
    assert api.repo_info(KERNEL, revision="v1.0", repo_type="kernel").sha == first  # the same commits
    address = f"{mirror.url}/kernels/{KERNEL}/resolve/main/large.bin"
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(requests.get(address).content)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [large] * 3
    assert upstream.log.read_text().count("resolve/") == len(set(_resolved(upstream))), "a file was copied twice"
    part = requests.get(address, headers={"Range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, large[100:200])

    # New commits, and refs that are gone, are seen when it is time.
    second = publish_kernel(upstream, write_kernel(tmp_path / "two", version=2, factor=3), branch="v2")
    upstream.api().delete_tag(KERNEL, tag="v1.0", repo_type="kernel")
    until = time.monotonic() + 30
    while "v2" not in {ref.name for ref in api.list_repo_refs(KERNEL, repo_type="kernel").branches}:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert api.repo_info(KERNEL, revision="v2", repo_type="kernel").sha == second
    assert api.list_repo_refs(KERNEL, repo_type="kernel").tags == []

    # Names of other organisations are not sent there, and what has a name here is not looked up.
    assert not api.repo_exists("strangers/twice", repo_type="kernel")
    assert "/strangers/twice/refs" not in upstream.log.read_text()
    api.create_repo("kernels-community/ours", repo_type="kernel")
    assert not api.repo_exists("kernels-community/none", repo_type="kernel")

    # Nothing is written to a copy; `hub check` misses nothing.
    with pytest.raises(HfHubHTTPError, match="is a copy from"):
        api.create_branch(KERNEL, branch="mine", repo_type="kernel")
    clone = ["git", "clone", "-q", f"{mirror.url}/kernels/{KERNEL}", str(tmp_path / "clone")]
    assert "is a copy from" in subprocess.run(clone, capture_output=True, text=True, check=False).stderr
    assert list(mend.find_defects(Hub(Settings(mirror.root)), digests=True)) == []

    upstream.kill()
    time.sleep(1.1)
    assert load(mirror, tmp_path / "another-home") == "2.0\n"
    for _ in range(9):  # more than may be copied at once
        assert "502" in _refused(mirror, "main", "never-read.bin")
    answer = requests.get(f"{mirror.url}/api/kernels/kernels-community/new")
    assert answer.status_code == 502 and "cannot be asked" in answer.json()["error"]
    assert list((mirror.root / "incoming").glob("*")) == []
    api.delete_repo(KERNEL, repo_type="kernel")  # frees the space
    mirror.stop()
    alone = start_hub(root=mirror.root)
    assert [item["id"] for item in requests.get(f"{alone.url}/api/kernels").json()] == ["kernels-community/ours"]


def _resolved(hub: RunningHub) -> list[str]:
    lines = [json.loads(line) for line in hub.log.read_text().splitlines() if "resolve/" in line]
    return [line["path"] for line in lines]


def test_contents_that_are_not_the_announced_ones_are_neither_stored_nor_sent(
    start_hub: Callable[..., RunningHub], start_mirror: Callable[..., RunningHub], tmp_path: Path
) -> None:
    upstream = start_hub(root=tmp_path / "upstream")
    api = upstream.api()
    publish_kernel(upstream, write_kernel(tmp_path / "one"))
    large = os.urandom(2_000_000)
    added = [CommitOperationAdd("large.bin", large)]
    api.create_commit(KERNEL, added, commit_message="m", repo_type="kernel")
    for path in (upstream.root / "large").rglob("*"):
        if path.is_file() and path.stat().st_size == len(large):
            path.write_bytes(large[:-1] + b"!")
    mirror = start_mirror(upstream)
    with pytest.raises(requests.exceptions.RequestException):
        requests.get(f"{mirror.url}/kernels/{KERNEL}/resolve/main/large.bin")
    assert len([path for path in (mirror.root / "large").rglob("*") if path.is_file()]) == 0
    assert list((mirror.root / "incoming").glob("*")) == []
    assert "was not copied" in mirror.log.read_text()


def _sitecustomize(folder: Path, trust: str) -> str:
    """Write a module that replaces the public Sigstore's roots of trust in new processes; return their PYTHONPATH."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "from sigstore.models import ClientTrustConfig\n"
        f"ClientTrustConfig.production = classmethod(lambda cls, offline=False: cls.from_json({trust!r}))\n"
    )
    return os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])


def _refused(mirror: RunningHub, revision: str = "v1", path: str = TABLE) -> str:
    """Return why a file is not served, or "" if it is."""
    answer = requests.get(f"{mirror.url}/kernels/{KERNEL}/resolve/{revision}/{path}")
    return "" if answer.ok else f"{answer.status_code} {answer.json()['error']}"


def test_signatures_of_packages_are_checked(
    start_hub: Callable[..., RunningHub],
    start_mirror: Callable[..., RunningHub],
    sigstore: sigstore_instance.Running,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    upstream = start_hub(root=tmp_path / "upstream")
    api = upstream.api()

    def job(names: tuple[str, str]) -> None:
        for name, value in sigstore.job_of(*names).items():
            monkeypatch.setenv(name, value)

    def change(message: str, *operations: Any) -> str:
        return str(
            api.create_commit(KERNEL, list(operations), commit_message=message, repo_type="kernel", revision="v1").oid
        )

    folder = write_kernel(tmp_path / "one")
    package = folder / "build" / VARIANT
    unsigned = publish_kernel(upstream, folder)
    job(TRUSTED)
    sign([package])
    signed = publish_kernel(upstream, folder)
    changed = change("python", CommitOperationAdd(f"build/{VARIANT}/__init__.py", b"def twice(x):\n    return x\n"))
    metadata = (package / "metadata.json").read_bytes()
    forged = change("metadata", CommitOperationAdd(f"build/{VARIANT}/metadata.json", metadata + b" "))
    stripped = change("signature", CommitOperationDelete(f"build/{VARIANT}/metadata.json.sigstore"))
    (package / "metadata.json.sigstore").unlink()
    job(OURS)
    sign([package])
    by_others = publish_kernel(upstream, folder)

    path = _sitecustomize(tmp_path / "site", sigstore.trust)
    mirror = start_mirror(upstream, "--mirror-refresh", "0", PYTHONPATH=path)
    assert _refused(mirror, unsigned) == "" and _refused(mirror, signed) == ""
    assert "the signature is" not in _refused(mirror, changed)
    assert "__init__.py is not the file that the digest" in _refused(mirror, changed)
    assert "its signature is wrong" in _refused(mirror, forged)
    assert "is not the file that the digest" in _refused(mirror, stripped)  # unsigned, but it has a digest
    assert "its signature is wrong" in _refused(mirror, by_others)
    assert _refused(mirror, by_others, "README.md") == "404 no file or folder 'README.md' at " + by_others
    for revision in (changed, forged, by_others):  # no file of the package, by no method
        address = f"{mirror.url}/kernels/{KERNEL}/resolve/{revision}/build/{VARIANT}/__init__.py"
        assert requests.head(address).status_code == requests.get(address).status_code == 403
    with pytest.raises(LocalEntryNotFoundError) as raised:
        mirror.api().snapshot_download(KERNEL, repo_type="kernel", revision="v1", cache_dir=tmp_path / "cache")
    assert "its signature is wrong" in str(raised.value.__cause__)  # which a traceback shows
    mirror.stop()

    ours = f"https://github.com/{OURS[1]}"
    strict = start_mirror(upstream, "--mirror-signer", ours, "--mirror-require-signature", PYTHONPATH=path)
    assert _refused(strict, by_others) == ""
    assert "it has no signature" in _refused(strict, unsigned) and "its signature is wrong" in _refused(strict, signed)
    strict.stop()
    # What was admitted is served while Sigstore cannot be reached; anything else waits.
    broken = _sitecustomize(tmp_path / "broken", "{")
    offline = start_mirror(upstream, "--mirror-signer", ours, "--mirror-require-signature", PYTHONPATH=broken)
    assert _refused(offline, by_others) == ""
    assert _refused(offline, signed).startswith("503 the signature of")


def test_a_hub_that_does_not_answer_keeps_nobody_else_waiting(start_hub: Callable[..., RunningHub]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        mirror = start_hub("--mirror", url, "--mirror-organization", "a")
        answers: list[int] = []

        def ask(number: int) -> None:
            with contextlib.suppress(requests.exceptions.RequestException):
                answers.append(requests.get(f"{mirror.url}/api/kernels/a/x{number}").status_code)

        threads = [threading.Thread(target=ask, args=[number], daemon=True) for number in range(50)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while len(answers) < 50 - 36 and time.monotonic() < until:  # 4 ask, and 32 wait for them
            time.sleep(0.05)
        assert answers == [503] * 14
        mirror.api().create_repo("b/ours", repo_type="kernel")
        for path in ("/health", "/api/kernels", "/api/kernels/b/ours"):
            assert requests.get(mirror.url + path, timeout=5).ok
        mirror.kill()


def test_options_of_a_mirror(tmp_path: Path) -> None:
    serve = ["hub", "serve", "--root", str(tmp_path)]
    for options, words in (
        (["--mirror", "https://x"], "expected the organisations"),
        (["--mirror-organization", "a"], "expected the address"),
        (["--mirror", "ftp://x", "--mirror-organization", "a"], "expected the address"),
        (
            ["--mirror", "http://x", "--mirror-organization", "a", "--mirror-signer", "me"],
            "neither the address of a workflow",
        ),
    ):
        done = CliRunner().invoke(main, [*serve, *options])
        assert done.exit_code and words in done.output, done.output


def test_packages_signed_by_a_key_are_served_by_its_public_key(
    start_hub: Callable[..., RunningHub], start_mirror: Callable[..., RunningHub], tmp_path: Path
) -> None:
    """Without Sigstore: nothing of it is asked for."""
    upstream = start_hub(root=tmp_path / "upstream")
    folder = write_kernel(tmp_path / "one")
    for name in ("signing", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], cwd=tmp_path, check=True)
    unsigned = publish_kernel(upstream, folder)
    by_other = by_key = ""
    for name in ("other", "signing"):
        done = CliRunner().invoke(main, ["sign", str(folder), "--key", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        by_other, by_key = by_key, publish_kernel(upstream, folder)
    signer = ["--mirror-signer", str(tmp_path / "signing.pub"), "--mirror-require-signature"]
    mirror = start_mirror(upstream, *signer, HTTPS_PROXY="http://127.0.0.1:9")
    assert load(mirror, tmp_path / "home") == "2.0\n"
    assert _refused(mirror, by_key) == ""
    assert "not by one of the trusted keys" in _refused(mirror, by_other)
    assert "it has no signature" in _refused(mirror, unsigned)
    mirror.stop()
    mirror = start_mirror(upstream)
    assert "by a key, and none is trusted" in _refused(mirror, by_key)
