"""Reads a package index: the files that it lists, and byte ranges of them. The only module that uses the network.

Any "simple" index works: PyPI, a company's mirror, or a directory of wheels behind a file server. A build asks the file
server for byte ranges; a server that ignores ranges works too, but sends all bytes before the range as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

import requests
from packaging.utils import canonicalize_name
from pypi_simple import ACCEPT_ANY, PYPI_SIMPLE_ENDPOINT, DistributionPackage, ProjectPage
from remotezip import RemoteZip, RemoteZipError
from requests import RequestException
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.exceptions import ChunkedEncodingError
from urllib3 import Retry
from urllib3.exceptions import HTTPError, MaxRetryError

from kernel_builder import network
from kernel_builder.limits import within_limits
from kernel_builder.toolchain.archives import reading
from kernel_builder.toolchain.lock import PinnedFile
from kernel_builder.version import VERSION
from kernel_format.errors import FetchError
from kernel_sandbox.programs import python_module, run_program

_TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two reads
_RETRIED = (429, 500, 502, 503, 504)  # within seconds: a long `Retry-After` would be a wait without a message
_LARGEST = 1 << 30  # bytes of a source distribution
_MOST_FILES = 100_000  # of a project
_ADDRESS_BYTES = 64 << 20  # of all of them: a page may have a long `base`
_CHUNK = 1 << 15  # bytes between two progress reports; a broken connection loses at most one chunk


def configured_url() -> str | None:
    """Return the index that pip or uv is set to use on this machine, or None where neither is set.

    The environment variables of both tools come first. pip reads its own configuration files.
    """
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if value := os.environ.get(name):
            return value
    # Environments that uv makes have no pip. Any other pip reads the same files of the user and the system.
    pip = python_module("pip") if find_spec("pip") else ["pip"]
    try:
        done = run_program(*pip, "config", "get", "global.index-url")
    except (OSError, SubprocessError):  # no pip
        return None
    # It fails if there is no such setting, or a file that it cannot read.
    return done.stdout.decode(errors="replace").strip() or None if done.returncode == 0 else None


class Index:
    """One simple index.

    Methods raise a FetchError if the index or its file server cannot be reached, or does not have the requested file.

    Args:
        url: The address, with user and password if the index needs them. None for the index that pip or uv is set to
            use, or else PyPI.
        retries: How often a failed request is repeated, and how long to wait between attempts.
    """

    def __init__(self, url: str | None = None, *, retries: Retry | None = None) -> None:
        parts = urlsplit(url or configured_url() or PYPI_SIMPLE_ENDPOINT)
        self.url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # without credentials
        if "@" in self.url:
            raise FetchError(
                "the address of the index is malformed",
                where="PIP_INDEX_URL",
                hint="begin it with https://, and write `/`, `?`, `#` and `@` in a password as %2F, %3F, %23 and %40",
            )
        self._retries = retries or Retry(
            4, backoff_factor=0.3, status_forcelist=_RETRIED, raise_on_status=False, respect_retry_after_header=False
        )
        self._session = requests.Session()
        self._session.headers["User-Agent"] = f"kernel-builder/{VERSION}"
        if "@" in parts.netloc:
            origin = urlsplit(self.url.lower())[:2]  # scheme, host and port
            basic = HTTPBasicAuth(*requests.utils.get_auth_from_url(parts.geturl()))
            # To one server only; an index may keep its files on another one.
            self._session.auth = lambda request: (
                basic(request) if urlsplit((request.url or "").lower())[:2] == origin else request
            )
        adapter = HTTPAdapter(max_retries=self._retries)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)
        self._session.hooks["response"].append(_limit)
        self._known: dict[str, list[DistributionPackage]] = {}

    def packages(self, project: str, wanted: str | None = None) -> list[DistributionPackage]:
        """List the files of a project.

        Args:
            wanted: The file or component that needs the project, for errors.
        """
        if project not in self._known:
            if os.environ.get("PIP_NO_INDEX", "").lower() in ("1", "true", "yes", "on"):
                raise FetchError(
                    "PIP_NO_INDEX forbids to use a package index",
                    where=wanted or project,
                    hint="unset it, or copy the cache directory (KERNEL_BUILDER_CACHE) of a machine that has it",
                )
            url = f"{self.url.rstrip('/')}/{canonicalize_name(project)}/"
            with self._reaching(wanted or project):
                page = self._session.get(url, headers={"Accept": ACCEPT_ANY}, timeout=_TIMEOUT)
                if page.status_code == HTTPStatus.NOT_FOUND:
                    raise self.lacks(wanted or project)
                page.raise_for_status()
            self._known[project] = within_limits(lambda: _files(page, project), page.url, refusal=FetchError)
        return self._known[project]

    def file(self, project: str, name: str) -> DistributionPackage:
        """Return a file of a project."""
        packages = self.packages(project, wanted=name)
        if package := next((package for package in packages if package.filename == name), None):
            return package
        raise self.lacks(name)

    def fetch(self, pin: PinnedFile, into: Path, report: Callable[[int], None] = lambda done: None) -> None:
        """Download the ranges of a pinned file, one after the other, continuing after the bytes that `into` has.

        Bytes that have arrived stay in the file after an error, so that the next call continues from there.

        Args:
            report: Called with the number of bytes in the file after each chunk.

        Raises:
            OSError: If the file cannot be written.
        """
        package = self.file(pin.project, pin.file)
        stated = package.digests.get("sha256", pin.sha256)
        if stated != pin.sha256:
            raise FetchError(
                f"the index states SHA-256 {stated}, expected {pin.sha256}",
                where=f"{pin.file} at {self.url}",
                hint="this index has a different file of that name; use one that mirrors PyPI",
            )
        before = 0
        with into.open("ab") as stream:
            for start, stop in pin.ranges:
                end = before + stop - start
                self._append(stream, package, stop - end, end, report)
                before = end

    def _append(
        self, stream: BinaryIO, package: DistributionPackage, shift: int, end: int, report: Callable[[int], None]
    ) -> None:
        """Append to a stream until its position is `end`. Its position plus `shift` is that in the file."""
        retries = self._retries
        while (have := stream.tell()) < end:
            with self._reaching(package.filename):
                headers = _range(have + shift, end + shift)
                response = self._session.get(package.url, headers=headers, timeout=_TIMEOUT, stream=True)
                response.raise_for_status()
            skip = 0 if response.status_code == 206 else have + shift  # a server may ignore ranges
            try:
                for chunk in _slice(response, skip, end - have):
                    stream.write(chunk)
                    report(stream.tell())
                if stream.tell() == have:
                    raise ChunkedEncodingError("the file server sent nothing")
            except RequestException as error:  # the connection broke inside the body
                stream.flush()
                if stream.tell() > have:
                    retries = self._retries
                try:
                    retries = retries.increment("GET", package.url, error=error)
                except (MaxRetryError, RequestException) as last:
                    raise self._unreachable(package.filename, error) from last
                retries.sleep()

    @contextmanager
    def open(self, wheel: DistributionPackage) -> Iterator[RemoteZip]:
        """Open a wheel as a zip file that downloads only the members that are read."""
        try:
            with (
                reading(wheel.filename),
                RemoteZip(wheel.url, session=self._session, timeout=_TIMEOUT, headers=_UNCOMPRESSED) as archive,
            ):
                yield archive
        except (RemoteZipError, HTTPError) as error:
            raise self._unreachable(wheel.filename, error) from error

    def read(self, package: DistributionPackage, start: int = 0, stop: int | None = None) -> bytes:
        """Download bytes `start` to `stop` of a file, or all of it, into memory."""
        headers = _UNCOMPRESSED if stop is None else _range(start, stop)
        with self._reaching(package.filename):
            response = self._session.get(package.url, headers=headers, timeout=_TIMEOUT, stream=True)
            response.raise_for_status()
            skip = 0 if response.status_code == 206 else start  # a server may ignore ranges
            return b"".join(_slice(response, skip, (stop or _LARGEST) - start))

    def lacks(self, wanted: str) -> FetchError:
        """Return the error for a file or component that the index does not have."""
        return FetchError(
            "the index does not have it",
            where=f"{wanted} at {self.url}",
            hint="set PIP_INDEX_URL to an index that mirrors PyPI",
        )

    def _unreachable(self, wanted: str, error: BaseException) -> FetchError:
        cause, remedy = network.explain(error) or (f"{error}{network.proxied(self.url)}", "")
        return FetchError(
            f"the index cannot be reached: {cause}",
            where=f"{wanted} at {self.url}",
            hint=remedy
            or "set PIP_INDEX_URL to an index that this machine can reach; or run "
            "`kernel-builder toolchain fetch` on a machine with network and copy its cache directory "
            "(KERNEL_BUILDER_CACHE); or use an installed CUDA toolkit (`--cuda-home`)",
        )

    @contextmanager
    def _reaching(self, wanted: str) -> Iterator[None]:
        try:
            yield
        except RequestException as error:
            raise self._unreachable(wanted, error) from error


_OTHER_INDEX = "set PIP_INDEX_URL to the address of another simple index"
# Compression would change which bytes a range means.
_UNCOMPRESSED = {"Accept-Encoding": "identity"}


def _limit(response: requests.Response, *, stream: bool = False, **_: object) -> None:
    """Limit a body that is read into memory as a whole."""
    body: Any = response.raw
    if not stream:
        error = FetchError("the answer is too long or too slow", where=response.url, hint=_OTHER_INDEX)
        body.stream = network.Answers().limited(body.stream, error)


def _files(page: requests.Response, project: str) -> list[DistributionPackage]:
    try:
        packages = ProjectPage.from_response(page, project).packages
    except MemoryError:
        raise
    except Exception as error:  # parsers raise any exception at hostile text
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FetchError(f"is not a package index: {reason}", where=page.url, hint=_OTHER_INDEX) from error
    if len(packages) > _MOST_FILES or sum(len(package.url) for package in packages) > _ADDRESS_BYTES:
        raise FetchError(f"lists more than {_MOST_FILES} files or long addresses", where=page.url, hint=_OTHER_INDEX)
    return packages


def _range(start: int, stop: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}", **_UNCOMPRESSED}


def _slice(response: requests.Response, skip: int, length: int) -> Iterator[bytes]:
    """Yield `length` bytes of a response's body after the first `skip`, then release the connection."""
    with response:
        position = 0
        for chunk in response.iter_content(_CHUNK):
            wanted = chunk[max(skip - position, 0) : max(skip + length - position, 0)]
            position += len(chunk)
            if wanted:
                yield wanted
            if position >= skip + length:
                return
