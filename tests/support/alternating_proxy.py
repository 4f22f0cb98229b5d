"""A proxy that sends each request, also those of one connection, to another server than the last."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.loopback import QuietHandler, served

_BLOCK = 64 << 10
_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}


@contextmanager
def alternating_proxy(
    urls: Sequence[str],
    certificate: Path | None = None,
    *,
    by_path: bool = False,
    more_headers: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run the proxy in the context, with TLS if there is a certificate, and yield its address.

    A server that refuses connections is left out. With `by_path`, each path has its own order of servers.
    `more_headers` are added to each request.
    """
    requests: Counter[str] = Counter()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            key = f"{self.command} {self.path}" if by_path else ""
            first = requests[key]
            requests[key] += 1
            for attempt in range(len(urls)):
                server = urlsplit(urls[(first + attempt) % len(urls)])
                connection = http.client.HTTPConnection(str(server.hostname), server.port)
                try:
                    connection.connect()
                    break
                except ConnectionRefusedError:
                    continue
            ours = {*_OF_ONE_CONNECTION, "content-length"}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ours}
            headers["X-Forwarded-Proto"] = "https" if certificate else "http"
            headers |= more_headers or {}
            if body or "Content-Length" in self.headers:
                headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            self.answer(connection.getresponse())
            connection.close()

        def answer(self, answer: http.client.HTTPResponse) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _OF_ONE_CONNECTION:
                    self.send_header(name, value)
            chunked = "Content-Length" not in answer.headers and self.command != "HEAD" and answer.status != 204
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while block := answer.read(_BLOCK):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = forward

    with served(Handler, certificate) as url:
        yield url
