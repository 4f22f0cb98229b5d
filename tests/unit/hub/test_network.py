"""Failed requests name their cause, and all clients trust the certificates that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from urllib3 import Retry

from kernel_builder import network, toml_file
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.toolchain.index import Index
from kernel_format.errors import ConfigError, FetchError, HubError
from tests.support.loopback import QuietHandler, served, write_certificate

VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "http_proxy")


class Page(QuietHandler):
    """Answers with a page, below /limited with the request to wait, and below /signed with a signed address."""

    def do_GET(self) -> None:
        if self.path.startswith("/signed"):
            return self.send(302, Location="/failing?Signature=secret")
        if self.path.startswith("/failing"):
            return self.send(500)
        self.send(429 if self.path.startswith("/limited") else 200, b"log in", Retry_After="900")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored even if the tested code sets it
        monkeypatch.delenv(name)
    huggingface_hub.close_session()  # its client has read the variables
    yield
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("path", "token", "proxy", "message", "hint"),
    toml_file.read(Path(__file__).with_name("failed_requests.toml"))["failing"],
)
def test_a_request_to_a_hub_names_the_cause_of_its_failure(
    path: str, token: str, proxy: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "" if proxy else "*")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", path == "/offline")
    if proxy:
        monkeypatch.setenv("http_proxy", proxy)
    with served(Page) as url, pytest.raises(HubError) as caught:
        address = "http://hub.example" if proxy else f"{url}{path}"
        RemoteRepository("org/kernel", endpoint=address, token=token or False).branches()
    assert message in caught.value.message and hint in str(caught.value.hint)
    assert "secret" not in str(caught.value)


@pytest.mark.attack
@pytest.mark.parametrize("address", ["http://me:secret@127.0.0.1:9", "http://me:s/secret@127.0.0.1:9", "me:secret@hub"])
def test_the_address_of_a_hub_has_no_password(address: str) -> None:
    with pytest.raises(HubError, match="HF_ENDPOINT, --endpoint or --from: the address of a Hub may not") as caught:
        RemoteRepository("org/kernel", endpoint=address)
    assert "secret" not in str(caught.value) and "HF_TOKEN" in str(caught.value.hint)


@pytest.mark.attack
@pytest.mark.parametrize("address", ["http://me:s#secret@127.0.0.1:9/simple", "me:secret@127.0.0.1:9/simple"])
def test_a_malformed_address_of_an_index_is_not_printed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", address)
    with pytest.raises(FetchError, match="PIP_INDEX_URL: the address of the index is malformed") as caught:
        Index(retries=Retry(0)).packages("torch")
    assert "secret" not in str(caught.value)


def test_a_hub_below_a_path_is_not_written_to() -> None:
    with pytest.raises(HubError, match="below the path /mirror can be read only"):
        RemoteRepository("org/kernel", endpoint="http://127.0.0.1:9/mirror", token="hf_a").require_write()


def test_an_index_that_limits_requests_is_an_error_in_seconds() -> None:
    with served(Page) as url, pytest.raises(FetchError, match="429"):
        Index(f"{url}/limited/").packages("torch")


def test_an_index_is_not_used_where_pip_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match="PIP_NO_INDEX forbids"):
        Index("http://127.0.0.1:9/").packages("torch")


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", None])
def test_all_clients_trust_the_certificates_of_one_variable(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_certificate(tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(file))
    network.trust_certificates()
    with served(Page, file) as tls:
        with pytest.raises(HubError) as of_hub:
            RemoteRepository("org/kernel", endpoint=tls, token=False).branches()
        index = Index(f"{tls}/simple/", retries=Retry(0))
        if variable:
            assert index.packages("torch") == [] and "login page" in of_hub.value.message
            return
        with pytest.raises(FetchError) as of_index:
            index.packages("torch")
    for caught in (of_hub, of_index):
        assert "TLS: self-signed certificate" in caught.value.message
        assert "SSL_CERT_FILE" in str(caught.value.hint)


@pytest.mark.parametrize("file", ["/no/such/file", __file__])
def test_a_missing_file_of_certificates_is_named(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", file)
    with pytest.raises(ConfigError, match=f"^REQUESTS_CA_BUNDLE: there is no file '{file}' with certificates"):
        network.trust_certificates()
