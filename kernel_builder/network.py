"""The certificates that all HTTP clients trust, the size of answers, and the causes of failed requests."""

from __future__ import annotations

import json
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kernel_format.errors import ConfigError

# httpx and OpenSSL read the first, requests the others.
_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# Debian, Fedora, Alpine. A company adds its CA to the system's file; the clients' own package of certificates lacks it.
_SYSTEM = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_PAGE = "docs/proxy.md"
ANSWER_BYTES, ANSWER_SECONDS = 32 << 20, 300.0  # of lists that one operation reads into memory, of one answer


def trust_certificates() -> None:
    """Let all clients of this process trust one file of certificates: that of the user's variable, or the system's."""
    name = next((name for name in _VARIABLES if os.environ.get(name)), None)
    file = Path(os.environ[name]) if name else next((Path(file) for file in _SYSTEM if Path(file).is_file()), None)
    if name and file and not file.is_dir() and not (file.exists() and b"-----BEGIN" in file.read_bytes()):
        raise ConfigError(
            f"there is no file {str(file)!r} with certificates",
            where=name,
            hint=f"name the file of the trusted certificates (PEM), or unset {name}: {_PAGE}",
        )
    if file:
        for variable in _VARIABLES:
            os.environ.setdefault(variable.replace("FILE", "DIR") if file.is_dir() else variable, str(file))


def explain(error: BaseException) -> tuple[str, str] | None:
    """Return the cause of a failed request and the remedy, or None if there is only the client's own text."""
    for each in _chain(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            advice = "name a file with the certificate of the network's CA in SSL_CERT_FILE"
            return f"TLS: {each.verify_message}", f"{advice}: {_PAGE}"
        if isinstance(each, ssl.SSLError):
            return f"TLS: {each.reason or each}", f"check the address, and the proxy if there is one: {_PAGE}"
        if type(each).__name__ == "OfflineModeIsEnabled":
            return "HF_HUB_OFFLINE is set, so the client sends no request", "unset HF_HUB_OFFLINE"
        if isinstance(each, json.JSONDecodeError):
            page = "the answer is no JSON: it is not a Hub's, but for example the login page of a network"
            return page, f"open the address in a browser, and check HF_ENDPOINT and the proxy: {_PAGE}"
        if isinstance(each, UnicodeEncodeError):
            return "the token has characters other than ASCII", "copy the token again: `hf auth login`, or HF_TOKEN"
    return None


class Answers(threading.local):
    """The bytes of answers, decompressed, that this thread may still read into memory: a server may send no end."""

    def __init__(self) -> None:
        self.left = ANSWER_BYTES

    def limited(self, read: Callable[..., Iterator[bytes]], error: Exception) -> Callable[..., Iterator[bytes]]:
        """Return a method that reads the parts of a body as `read` does; too many or too slow ones raise an error."""

        def parts(*arguments: object, **options: object) -> Iterator[bytes]:
            end = time.monotonic() + ANSWER_SECONDS
            for part in read(*arguments, **options):
                self.left -= len(part)
                if self.left < 0 or time.monotonic() > end:
                    raise error
                yield part

        return parts


def proxied(url: str) -> str:
    """Return ` through the proxy ...` if requests to an address use one, without its password."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return ""
    shown = re.sub(r"^(\w+://)?.*@", r"\1", proxy)
    return f" through the proxy {shown} ({parts.scheme.upper()}_PROXY, NO_PROXY)"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or wraps."""
    seen: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, BaseException) and each not in seen:
            seen.append(each)
            yield each
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
