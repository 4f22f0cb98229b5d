"""A package index on loopback that forwards requests to the configured index and counts the bytes that arrive."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT, ProjectPage

from kernel_builder.toolchain.index import configured_url


class CountingIndex:
    """The index; it serves while the context is open.

    Attributes:
        received: File name, or `PROJECT (page)` -> bytes that the configured index sent for it.
    """

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self._upstream = configured_url() or PYPI_SIMPLE_ENDPOINT
        self._session = requests.Session()
        self._files: dict[str, str] = {}

    def __enter__(self) -> CountingIndex:
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kind, _, name = self.path.strip("/").partition("/")
                if kind == "simple":
                    index._send_page(self, name)
                else:
                    index._send_file(self, name)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/simple/"

    def _send_page(self, handler: BaseHTTPRequestHandler, project: str) -> None:
        headers = {"Accept": handler.headers["Accept"] or "*/*"}
        with self._session.get(f"{self._upstream.rstrip('/')}/{project}/", headers=headers, stream=True) as response:
            response.raise_for_status()
            packages = ProjectPage.from_response(response, project).packages
            self.received[f"{project} (page)"] += response.raw.tell()
        self._files.update({package.filename: package.url for package in packages})
        links = [
            f'<a href="/files/{package.filename}#sha256={package.digests["sha256"]}">{package.filename}</a>'
            for package in packages
        ]
        body = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        headers = {"Range": handler.headers["Range"], "Accept-Encoding": "identity"}
        with self._session.get(self._files[name], headers=headers, stream=True) as response:
            handler.send_response(response.status_code)
            for header in ("Content-Length", "Content-Range"):
                if header in response.headers:
                    handler.send_header(header, response.headers[header])
            handler.end_headers()
            for chunk in response.raw.stream(1 << 16, decode_content=False):
                self.received[name] += len(chunk)
                handler.wfile.write(chunk)
