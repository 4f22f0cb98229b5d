"""Small HTTP servers on loopback, in threads of the test: they stand in for services that a test cannot reach."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class QuietHandler(BaseHTTPRequestHandler):
    """Answers requests without a line on stderr for each, nor for clients that are killed."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer, to HEAD without its body. `_` in the name of a header means `-`."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def send_json(self, status: int, answer: object) -> None:
        self.send(status, json.dumps(answer).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def write_certificate(directory: Path) -> Path:
    """Write a certificate for 127.0.0.1 that signs itself, with its key, and return the file."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "company.pem", "-out", "certificate.pem"]
    subprocess.run(command, check=True, capture_output=True, cwd=directory)
    both = directory / "company.pem"
    both.write_text((directory / "certificate.pem").read_text() + both.read_text())
    return both


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler], certificate: Path | None = None) -> Iterator[str]:
    """Serve requests in the context, each in a thread, with TLS if there is a certificate; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
