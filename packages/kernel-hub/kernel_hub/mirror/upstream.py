"""The other Hub of a mirror: its list of refs, its git repositories, and its large files.

The other Hub may be hostile, or be replaced by somebody who is. It chooses what is sent and where its redirects lead,
so each has limits: of size, of time, and of the addresses that are asked.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import resource
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from kernel_hub import __version__
from kernel_hub.git.command import git_command, git_environment, run_git
from kernel_hub.git.trees import BLOB_BYTES

SECONDS = 15.0  # without an answer, or without data
REFS_SECONDS = 60.0  # for all of a list of refs
FETCH_SECONDS = 600
MOST_REFS = 1000
_REFS_BYTES = 8 << 20
_FETCH_LIMITS = {resource.RLIMIT_FSIZE: 4 << 30, resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_CPU: FETCH_SECONDS}

# What a copy may have in git: objects of each type, and the bytes of one.
_MOST_OBJECTS = {"commit": 100_000, "tag": 10_000, "tree": 2_000_000, "blob": 2_000_000}
_LARGEST_OBJECT = {"commit": 1 << 20, "tag": 1 << 20, "tree": 16 << 20, "blob": BLOB_BYTES}

# Where the other Hub is reached, and which certificates are believed. Nothing else of the machine's applies to git.
_NETWORK = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir", "git_ssl_cainfo")
_SETTINGS = (
    "credential.helper=",
    *("protocol.allow=never", "protocol.http.allow=always", "protocol.https.allow=always", "protocol.version=2"),
    *("http.lowSpeedLimit=1000", "http.lowSpeedTime=30", "http.followRedirects=false"),
    *("maintenance.auto=false", "fetch.unpackLimit=1"),
    "core.bigFileThreshold=16m",  # larger blobs are not unpacked in memory
)


class UpstreamError(Exception):
    """The other Hub cannot be reached, or does not answer as a Hub does."""


class Upstream:
    """The Hub at `url`. It is asked without a token."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opener = _opener(self.url)
        self._renamed: dict[str, str] = {}  # what repositories are called there now

    def refs(self, repo_id: str) -> Mapping[str, str] | None:
        """Return the branches and tags of a repository by their full names, or None if there is no such repository.

        Raises:
            UpstreamError: If the Hub cannot be reached, or sends too much.
        """
        try:
            with self._open(f"/api/kernels/{repo_id}/refs") as answer:
                self._note_name(repo_id, answer.geturl())
                listed = json.loads(b"".join(_read_in_time(answer)))
            refs = {str(ref["ref"]): str(ref["targetCommit"]) for ref in [*listed["branches"], *listed["tags"]]}
        except urllib.error.HTTPError as error:
            if error.code in {401, 403, 404}:
                return None
            raise UpstreamError(f"{self.url} answers {error.code}") from error
        except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException) as error:
            raise UpstreamError(f"{self.url} cannot be asked: {_shown(error)}") from error
        if len(refs) > MOST_REFS:
            raise UpstreamError(f"{repo_id} has {len(refs)} branches and tags on {self.url}; at most {MOST_REFS}")
        return {
            full: commit
            for full, commit in refs.items()
            if re.fullmatch(r"refs/(heads|tags)/.+", full) and re.fullmatch(r"[0-9a-f]{40}", commit)
        }

    def _note_name(self, repo_id: str, url: str) -> None:
        """Remember the name to which the list of refs was redirected: git follows no redirect."""
        named = re.fullmatch(re.escape(self.url) + r"/api/kernels/([\w.-]+/[\w.-]+)/refs", url)
        if named and named[1] != repo_id:
            if len(self._renamed) > MOST_REFS:
                self._renamed.clear()
            self._renamed[repo_id] = named[1]
        else:
            self._renamed.pop(repo_id, None)

    def open(self, repo_id: str, commit: str, path: str) -> http.client.HTTPResponse:
        """Open a file of a revision for reading.

        Raises:
            UpstreamError: If the Hub cannot be reached, or refuses.
        """
        try:
            return self._open(f"/kernels/{repo_id}/resolve/{commit}/{quote(path)}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UpstreamError(f"{self.url} does not send {path} of {repo_id}: {_shown(error)}") from error

    def _open(self, path: str) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.url + path, headers={"User-Agent": f"kernel-hub/{__version__}"})
        opened: http.client.HTTPResponse = self._opener.open(request, timeout=SECONDS)
        return opened

    def fetch(self, repo_id: str, commits: Sequence[str], into: Path) -> None:
        """Fetch commits, with their history and small files, into a git repository. No ref is moved.

        Raises:
            UpstreamError: If git is not installed, or cannot fetch them.
        """
        network = {name: value for name, value in os.environ.items() if name.lower() in _NETWORK}
        address = f"{self.url}/kernels/{self._renamed.get(repo_id, repo_id)}"
        fetch = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", address, *commits)
        try:
            done = run_git(
                *("-C", str(into), *fetch),
                seconds=FETCH_SECONDS,
                settings=_SETTINGS,
                environment={**network, "GIT_TERMINAL_PROMPT": "0"},
                limits=_FETCH_LIMITS,
            )
        except FileNotFoundError:
            raise UpstreamError("this machine has no git, which a mirror needs") from None
        except subprocess.TimeoutExpired:
            raise UpstreamError(f"{address} did not send its commits in {FETCH_SECONDS} s") from None
        if done.returncode:
            raise UpstreamError(f"git cannot fetch {address}: {(done.stderr.strip() or '?').splitlines()[-1][:500]}")


def check_objects(git_directory: Path) -> None:
    """Check how many objects a git repository has, and how large they are. None of them is unpacked.

    Raises:
        UpstreamError: If there are more than a copy may have, or larger ones.
    """
    listing = ("--batch-all-objects", "--unordered", "--buffer", "--batch-check=%(objecttype) %(objectsize)")
    command = git_command("-C", str(git_directory), "cat-file", *listing)
    counts = dict.fromkeys(_MOST_OBJECTS, 0)
    with subprocess.Popen(command, env=git_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kind, _, size = line.partition(" ")
            counts[kind] += 1
            if counts[kind] > _MOST_OBJECTS[kind] or int(size) > _LARGEST_OBJECT[kind]:
                process.kill()
                raise UpstreamError(
                    f"it has more than {_MOST_OBJECTS[kind]} objects of type {kind}, or one of more than "
                    f"{_LARGEST_OBJECT[kind]} bytes"
                )


def _read_in_time(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Read a list of refs, unless it is too long or comes too slowly."""
    until, size = time.monotonic() + REFS_SECONDS, 0
    while block := answer.read1(1 << 16):
        size += len(block)
        if size > _REFS_BYTES or time.monotonic() > until:
            raise ValueError(f"its list of refs has more than {_REFS_BYTES} bytes, or takes {REFS_SECONDS:.0f} s")
        yield block


def _shown(error: Exception) -> str:
    return str(error)[:500]


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens addresses of the Hub at `url`, and those to which it redirects."""
    opener = urllib.request.OpenerDirector()
    origin = urlsplit(url).netloc
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
        _Http(origin),
        _Https(origin),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.startswith("https:"):
            raise urllib.error.URLError("it redirects from https to an address that is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_peer(connected: socket.socket, host: str) -> None:
    """Refuse to send a request to an address of this machine or its network, to which only a redirect can lead.

    The address that was reached is judged, and not a name, which may have had another address a moment ago.
    """
    address = ipaddress.ip_address(connected.getpeername()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_global:
        connected.close()
        raise urllib.error.URLError(f"it redirects to {host}, which is not an address of the internet")


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _check_peer(self.sock, self.host)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _check_peer(self.sock, self.host)


class _Http(urllib.request.HTTPHandler):
    """Opens addresses: those of the Hub itself and by a proxy, and others if they belong to the internet."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self._origin = origin

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        trusted = req.host == self._origin or req.has_proxy()
        return self.do_open(http.client.HTTPConnection if trusted else _Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, origin: str) -> None:
        super().__init__()
        self._origin = origin

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        trusted = req.host == self._origin or req.has_proxy() or bool(getattr(req, "_tunnel_host", None))
        return self.do_open(http.client.HTTPSConnection if trusted else _SecureConnection, req)
