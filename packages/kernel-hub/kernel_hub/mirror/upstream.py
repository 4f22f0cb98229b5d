"""The other Hub of a mirror: its list of refs, its git repositories, and its large files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

from kernel_hub import __version__
from kernel_hub.git.command import run_git

SECONDS = 15.0  # without an answer, or without data
FETCH_SECONDS = 600
_REFS_BYTES = 8 << 20

# Where the other Hub is reached, and which certificates are believed. Nothing else of the machine's applies to git.
_NETWORK = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir", "git_ssl_cainfo")
_SETTINGS = (
    "credential.helper=",
    *("protocol.allow=never", "protocol.http.allow=always", "protocol.https.allow=always", "protocol.version=2"),
    *("http.lowSpeedLimit=1000", "http.lowSpeedTime=30"),
    *("maintenance.auto=false", "fetch.unpackLimit=1"),
)


class UpstreamError(Exception):
    """The other Hub cannot be reached, or does not answer as a Hub does."""


class Upstream:
    """The Hub at `url`. It is asked without a token."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def refs(self, repo_id: str) -> Mapping[str, str] | None:
        """Return the branches and tags of a repository by their full names, or None if there is no such repository.

        Raises:
            UpstreamError: If the Hub cannot be reached.
        """
        try:
            with self._open(f"/api/kernels/{repo_id}/refs") as answer:
                listed = json.loads(answer.read(_REFS_BYTES))
            refs = {str(ref["ref"]): str(ref["targetCommit"]) for ref in [*listed["branches"], *listed["tags"]]}
        except urllib.error.HTTPError as error:
            if error.code in {401, 403, 404}:
                return None
            raise UpstreamError(f"{self.url} answers {error.code}") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UpstreamError(f"{self.url} cannot be asked: {error}") from error
        return {
            full: commit
            for full, commit in refs.items()
            if re.fullmatch(r"refs/(heads|tags)/.+", full) and re.fullmatch(r"[0-9a-f]{40}", commit)
        }

    def open(self, repo_id: str, commit: str, path: str) -> IO[bytes]:
        """Open a file of a revision for reading.

        Raises:
            UpstreamError: If the Hub cannot be reached, or refuses.
        """
        try:
            return self._open(f"/kernels/{repo_id}/resolve/{commit}/{quote(path)}")
        except OSError as error:
            raise UpstreamError(f"{self.url} does not send {path} of {repo_id}: {error}") from error

    def _open(self, path: str) -> IO[bytes]:
        request = urllib.request.Request(self.url + path, headers={"User-Agent": f"kernel-hub/{__version__}"})
        opened: IO[bytes] = urllib.request.urlopen(request, timeout=SECONDS)
        return opened

    def fetch(self, repo_id: str, commits: Sequence[str], into: Path) -> None:
        """Fetch commits, with their history and small files, into a git repository. No ref is moved.

        Raises:
            UpstreamError: If git is not installed, or cannot fetch them.
        """
        network = {name: value for name, value in os.environ.items() if name.lower() in _NETWORK}
        address = f"{self.url}/kernels/{repo_id}"
        fetch = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", address, *commits)
        try:
            done = run_git(
                *("-C", str(into), *fetch),
                seconds=FETCH_SECONDS,
                settings=_SETTINGS,
                environment={**network, "GIT_TERMINAL_PROMPT": "0"},
            )
        except FileNotFoundError:
            raise UpstreamError("this machine has no git, which a mirror needs") from None
        except subprocess.TimeoutExpired:
            raise UpstreamError(f"{address} did not send its commits in {FETCH_SECONDS} s") from None
        if done.returncode:
            raise UpstreamError(f"git cannot fetch {address}: {(done.stderr.strip() or '?').splitlines()[-1]}")
