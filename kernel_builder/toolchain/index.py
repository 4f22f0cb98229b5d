"""The package index: which files it has, and bytes of them. The only module that talks to the network.

Any "simple" index will do: the default one, a company's, or a directory of wheels behind a plain file server. File
servers that answer range requests send only what is needed; others work too, at the cost of the bytes before it.
"""

from __future__ import annotations

import configparser
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import kernel_builder
from kernel_builder.errors import FetchError
from kernel_builder.toolchain.lock import Wheel

if TYPE_CHECKING:
    import requests
    from pypi_simple import DistributionPackage
    from urllib3 import Retry

_TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two reads
_CHUNK = 1 << 15  # bytes between two reports; a connection that breaks loses at most as many


def configured_url(environment: Mapping[str, str] = os.environ) -> str | None:
    """The index that this machine's pip or uv is set to use: by environment, else by a pip configuration file."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if value := environment.get(name):
            return value
    configuration_home = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    candidates = [
        environment.get("PIP_CONFIG_FILE"),
        f"{sys.prefix}/pip.conf",
        f"{configuration_home}/pip/pip.conf",
        str(Path.home() / ".pip/pip.conf"),
        *(f"{directory}/pip/pip.conf" for directory in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")),
        "/etc/pip.conf",
    ]
    for candidate in filter(None, candidates):
        parser = configparser.RawConfigParser()
        try:
            parser.read(candidate, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if value := parser.get("global", "index-url", fallback=None):
            return value
    return None


class Index:
    """One simple index.

    Args:
        url: Its address, with user and password where it needs them; else what pip or uv is set to use, else the
            default one.
        retries: How often and how patiently a failed request is made again.
    """

    def __init__(self, url: str | None = None, *, retries: Retry | None = None) -> None:
        import requests
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        parts = urlsplit(url or configured_url() or PYPI_SIMPLE_ENDPOINT)
        self._host = parts.hostname
        self.url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))  # fit to be shown
        self._retries = retries or Retry(
            total=4, backoff_factor=0.3, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False
        )
        self._session = requests.Session()
        self._session.headers["User-Agent"] = f"kernel-builder/{kernel_builder.__version__}"
        if "@" in parts.netloc:
            self._session.auth = _auth_for(self._host, requests.utils.get_auth_from_url(parts.geturl()))
        adapter = HTTPAdapter(max_retries=self._retries)
        self._session.mount("https://", adapter)
        self._session.mount("http://", adapter)
        self._pages = PyPISimple(self.url, session=self._session)
        self._known: dict[str, list[DistributionPackage]] = {}

    def packages(self, project: str, wanted: str | None = None) -> list[DistributionPackage]:
        """The files that the index lists for a project.

        Args:
            wanted: What it is for, for the error's text.

        Raises:
            FetchError: If the index cannot be reached or does not have the project.
        """
        from pypi_simple import NoSuchProjectError, UnsupportedContentTypeError, UnsupportedRepoVersionError

        if project not in self._known:
            try:
                with self._reaching(wanted or project):
                    self._known[project] = self._pages.get_project_page(project, timeout=_TIMEOUT).packages
            except NoSuchProjectError:
                raise self._lacks(wanted or project) from None
            except (UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
                raise FetchError(
                    f"does not answer as a package index: {error}",
                    where=self.url,
                    hint="give the address of a simple index, by `--index-url` or PIP_INDEX_URL",
                ) from error
        return self._known[project]

    def fetch(self, wheel: Wheel, start: int, stop: int, into: Path, report: Callable[[int], None]) -> None:
        """Append to a file what it lacks of a wheel's bytes `start` to `stop`.

        What has arrived stays in the file whatever happens, so that a later call goes on from there.

        Args:
            report: Told the number of bytes in the file, from time to time.

        Raises:
            FetchError: If the index cannot be reached, or has another file under this name.
            OSError: If the file cannot be written.
        """
        from requests import RequestException
        from urllib3.exceptions import MaxRetryError

        url = self._locate(wheel)
        retries = self._retries
        with into.open("ab") as stream:
            while (have := stream.tell()) < stop - start:
                body = self._open(wheel, url, start + have, stop)
                try:
                    for chunk in body:
                        stream.write(chunk)
                        report(stream.tell())
                except RequestException as error:  # the connection broke within the body
                    stream.flush()
                    if stream.tell() > have:
                        retries = self._retries
                    try:
                        retries = retries.increment("GET", url, error=error)
                    except (MaxRetryError, RequestException) as last:
                        raise self._unreachable(wheel.file, error) from last
                    retries.sleep()

    def size(self, wheel: DistributionPackage) -> int:
        """Bytes of a file, whether or not the index lists them.

        Raises:
            FetchError: If the file server does not answer range requests.
        """
        with (
            self._reaching(wheel.filename),
            self._session.get(wheel.url, headers=_range(0, 1), timeout=_TIMEOUT, stream=True) as response,
        ):
            total = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
            if not total:
                raise FetchError(
                    f"the file server answers {response.status_code} and not the range asked for",
                    where=wheel.filename,
                    hint="use an index whose file server answers range requests",
                )
            return int(total[1])

    def open(self, wheel: DistributionPackage) -> io.BufferedReader:
        """A file of the index as a seekable stream that fetches what is read.

        Raises:
            FetchError: On opening or reading, if the file server cannot be reached or does not answer range requests.
        """
        return io.BufferedReader(_RemoteFile(self, wheel.url, wheel.filename, self.size(wheel)), buffer_size=1 << 16)

    def read(self, url: str, name: str, start: int, stop: int) -> bytes:
        """Bytes of a remote file, held in memory.

        Raises:
            FetchError: If they cannot be had.
        """
        with self._reaching(name):
            response = self._session.get(url, headers=_range(start, stop), timeout=_TIMEOUT)
            response.raise_for_status()
            return response.content

    def _locate(self, wheel: Wheel) -> str:
        for package in self.packages(wheel.project, wanted=wheel.file):
            if package.filename != wheel.file:
                continue
            stated = package.digests.get("sha256", wheel.sha256)
            if stated != wheel.sha256:
                raise FetchError(
                    f"the index states SHA-256 {stated}, expected {wheel.sha256}",
                    where=f"{wheel.file} at {self.url}",
                    hint="this index has another file under that name: use one that mirrors the original",
                )
            return package.url
        raise self._lacks(wheel.file)

    def _open(self, wheel: Wheel, url: str, start: int, stop: int) -> Iterator[bytes]:
        with self._reaching(wheel.file):
            response = self._session.get(url, headers=_range(start, stop), timeout=_TIMEOUT, stream=True)
            if response.status_code == 416:
                raise self._resized(wheel, response.headers.get("Content-Range", "").rpartition("/")[2])
            response.raise_for_status()
        skip = 0
        if response.status_code == 206:
            stated = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not stated or int(stated[1]) != start:
                raise FetchError("answered with another range than asked for", where=f"{wheel.file} at {self.url}")
            if stated[2] not in {"*", str(wheel.size)}:
                raise self._resized(wheel, stated[2])
        else:
            skip = start
            total = response.headers.get("Content-Length")
            if total is not None and int(total) != wheel.size:
                raise self._resized(wheel, total)
        return _slice(response, skip, stop - start)

    def _resized(self, wheel: Wheel, got: str) -> FetchError:
        return FetchError(
            f"has {got or 'another number of'} bytes at the index, expected {wheel.size}: truncated, or another file",
            where=f"{wheel.file} at {self.url}",
            hint="try again, or another index (`--index-url`)",
        )

    def _lacks(self, wanted: str) -> FetchError:
        return FetchError(
            "the index does not have it",
            where=f"{wanted} at {self.url}",
            hint="use an index that mirrors the default one, by `--index-url` or PIP_INDEX_URL",
        )

    def _unreachable(self, wanted: str, error: BaseException) -> FetchError:
        return FetchError(
            f"the index cannot be reached: {error}",
            where=f"{wanted} at {self.url}",
            hint="name an index within reach by `--index-url` or PIP_INDEX_URL; or run `kernel-builder toolchain "
            "fetch` on a machine with network and copy its cache directory (KERNEL_BUILDER_CACHE); or use a toolkit "
            "that is here (`--cuda-home`)",
        )

    @contextmanager
    def _reaching(self, wanted: str) -> Iterator[None]:
        from requests import RequestException

        try:
            yield
        except RequestException as error:
            raise self._unreachable(wanted, error) from error


def _range(start: int, stop: int) -> dict[str, str]:
    # Compression would change which bytes a range means.
    return {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}


def _slice(response: requests.Response, skip: int, length: int) -> Iterator[bytes]:
    """`length` bytes of a response's body after the first `skip`; the connection is given back at the end."""
    with response:
        position = 0
        for chunk in response.iter_content(_CHUNK):
            wanted = chunk[max(skip - position, 0) : max(skip + length - position, 0)]
            position += len(chunk)
            if wanted:
                yield wanted
            if position >= skip + length:
                return


def _auth_for(host: str | None, credentials: tuple[str, str]) -> requests.auth.AuthBase:
    """Credentials that go to one host only: an index may keep its files elsewhere."""
    from requests.auth import AuthBase, HTTPBasicAuth

    basic = HTTPBasicAuth(*credentials)

    class SameHost(AuthBase):
        def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
            if urlsplit(request.url or "").hostname == host:
                basic(request)
            return request

    return SameHost()


class _RemoteFile(io.RawIOBase):
    def __init__(self, index: Index, url: str, name: str, size: int) -> None:
        self._index, self._url, self._name, self._size = index, url, name, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        stop = min(self._position + len(buffer), self._size)
        if stop <= self._position:
            return 0
        data = self._index.read(self._url, self._name, self._position, stop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
