"""Publications whose connection breaks, and files that are sent once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kernel_format.errors import KernelBuilderError
from tests.support.running_hub import RunningHub

from .conftest import DOUBLING, edit, put, tree

CUDA = "torch-cuda"


class CuttingProxy:
    """A proxy to a Hub that closes all connections after a number of bytes from the client."""

    def __init__(self, hub: RunningHub, limit: int | None) -> None:
        self.port = int(hub.url.rpartition(":")[2])
        self.limit, self.sent = limit, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
                hub = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                return
            for source, target, counted in ((client, hub, True), (hub, client, False)):
                threading.Thread(target=self._carry, args=(source, target, counted), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if counted:
                    self.sent += len(data)
                if self.limit is not None and self.sent > self.limit:
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_repeated_upload_after_a_cut_completes_it(
    start_hub: Callable[..., RunningHub], quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # before a retry
    large = quick / "build" / CUDA / "table.py"
    large.write_text("".join(f"# {number:0100}\n" for number in range(15_000)))
    edit(quick / "build" / CUDA, "table.py", "#", "#")
    whole = start_hub(root=tmp_path / "whole")
    proxy = CuttingProxy(whole, None)
    put(whole, quick, endpoint=proxy.url)
    wanted = tree(whole, DOUBLING, "v1"), tree(whole, DOUBLING, "main")
    hub = start_hub(root=tmp_path / "cut")
    for tenth in (1, 5, 9):
        broken = CuttingProxy(hub, proxy.sent * tenth // 10)
        with pytest.raises(KernelBuilderError):
            put(hub, quick, f"org/cut-{tenth}", endpoint=broken.url)
        assert not put(hub, quick, f"org/cut-{tenth}").kept
        assert tree(hub, f"org/cut-{tenth}", "v1") == wanted[0]


def test_equal_files_are_sent_once(own_hub: RunningHub, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    package = quick / "build" / CUDA
    for name in ("one.py", "two.py"):
        (package / name).write_text("".join(f"# {number:0100}\n" for number in range(15_000)))
    edit(package, "one.py", "#", "#")
    assert put(own_hub, quick).builds.bytes < 2_000_000
    requests = [json.loads(line) for line in own_hub.log.read_text().splitlines() if line.startswith("{")]
    assert sum(request.get("method") == "PUT" for request in requests) == 1
