"""The choice of the index, retries, and credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.config.variant import this_platform
from kernel_builder.toolchain import lock
from kernel_builder.toolchain.index import Index, configured_url
from kernel_format.errors import FetchError

from .index_server import IndexServer


def test_the_index_that_pip_or_uv_is_set_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    configuration = tmp_path / "xdg/pip/pip.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("[global]\nindex-url = http://from.file/simple\n")
    named = tmp_path / "named.conf"
    named.write_text("[global]\nindex-url = http://from.named/simple\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    expected = [
        ("PIP_CONFIG_FILE", str(named), "http://from.named/simple"),
        ("UV_INDEX_URL", "http://from.uv/simple", "http://from.uv/simple"),
        ("UV_DEFAULT_INDEX", "http://from.uv2/simple", "http://from.uv2/simple"),
        ("PIP_INDEX_URL", "http://from.pip/simple", "http://from.pip/simple"),
    ]
    assert configured_url(environment) == "http://from.file/simple"
    for name, value, url in expected:  # each setting takes precedence over those above it
        environment[name] = value
        assert configured_url(environment) == url


def test_credentials_are_sent_to_the_index_only_and_never_shown(
    wheel_files: dict[str, bytes], pinned: lock.Lock, tmp_path: Path
) -> None:
    wheel = pinned["torch-2.10-stable"][this_platform()].files[0]
    with IndexServer(dict(wheel_files), password=("me", "secret"), file_host="localhost") as server:
        url = server.url.replace("//", "//me:secret@")
        index = Index(url)
        index.fetch(wheel, tmp_path / "part")
        assert (tmp_path / "part").stat().st_size == wheel.download
        assert {request.authorization for request in server.requests} == {None}
        with pytest.raises(FetchError) as caught:
            index.packages("no-such-project")
        assert "secret" not in str(caught.value)
        with pytest.raises(FetchError, match="401"):
            Index(server.url).packages("torch")
