"""Untrusted names in all code that writes files under them."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.hf_api import RepoFile
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from urllib3 import Retry

from kernel_builder import network
from kernel_builder.hub import package_api, partial_download, publish, remote_repository
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.toolchain import archives
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import PinnedFile
from kernel_format.errors import HubError, KernelBuilderError, PackageError, VerificationError
from kernel_format.untrusted_paths import UnsafePath, checked_path, checked_tree
from tests.support.files import write_files
from tests.support.git import commit_all, git
from tests.support.loopback import QuietHandler, served

pytestmark = pytest.mark.attack

REPOSITORY, COMMIT = "org/kernel", "0" * 40
PARTS = [".", "..", "", "a", "build", ".git", "con", "\\", "a\0b", "\ud800", "x" * 300, "\x1b[2J", "metadata.json", "~"]
NAMES = some.one_of(
    some.lists(some.sampled_from(PARTS), min_size=1, max_size=5).map("/".join),
    some.text(max_size=20),
    some.sampled_from(["/etc/passwd", "//a", "../../a", "a/../../b", "C:\\a", "-rf", "a" * 2000, "a/" * 500 + "b"]),
)
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


class HostileHub:
    """Answers of a Hub that lists other files than those that it sends."""

    def __init__(self, sent: Mapping[str, bytes], listed: Sequence[tuple[str, bytes]]) -> None:
        self.sent, self.listed = sent, listed

    def list_repo_tree(self, *_: Any, **__: Any) -> Iterator[RepoFile]:
        for path, content in self.listed:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            yield RepoFile(path=path, size=len(content), oid=blob)  # type: ignore[no-untyped-call]

    def snapshot_download(self, *_: Any, allow_patterns: Sequence[str], **__: Any) -> str:
        return "/nonexistent"

    def hf_hub_download(self, _: str, filename: str, *, local_dir: Path, **__: Any) -> str:
        (local_dir / filename).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / filename).write_bytes(self.sent.get(filename, b"x"))
        return str(local_dir / filename)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostileHub], None]:
    """Make every repository one of a hostile Hub."""

    def install(hub: HostileHub) -> None:
        for name in ("list_repo_tree", "hf_hub_download", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub.HfApi, name, getattr(hub, name))

    return install


def repository() -> RemoteRepository:
    return RemoteRepository(REPOSITORY, endpoint="http://hub", token="any")


@pytest.mark.parametrize(
    ("paths", "message"),
    [(["a", "../../home/me/file"], "leaves its directory"), ([f"a{number}" for number in range(12)], "more than")],
)
def test_a_listing_with_too_many_paths_or_one_out_of_the_repository_is_refused(
    paths: list[str], message: str, answer: Callable[[HostileHub], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_repository, "MAX_FILES", 10)
    answer(HostileHub({}, [(path, b"known content") for path in paths]))
    with pytest.raises(VerificationError, match=message):
        repository().files(COMMIT)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["build/a", "build/a/b"], "a file and a directory"),
        (["a", "a"], "twice"),
        (["\ud800"], "cannot be shown"),
        (["../a"], "leaves its directory"),
        (["/a"], "leaves its directory"),
        (["a//b"], "leaves its directory"),
        (["build/" + "x" * 300], "too long"),
    ],
)
def test_paths_that_no_directory_can_have_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(UnsafePath, match=message):
        checked_tree(paths)


def test_a_hub_that_sends_more_than_it_lists_is_cut_off(
    tmp_path: Path, answer: Callable[[HostileHub], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_repository, "_TRANSFER_BYTES", 1 << 20)
    answer(HostileHub({"a": b"x" * (2 << 20)}, [("a", b"x")]))
    listed = repository().files(COMMIT)
    with pytest.raises(VerificationError, match="sends more"):
        repository().download_into(tmp_path, COMMIT, listed)
    answer(HostileHub({"a": b"xx"}, [("a", b"x"), ("b", b"xxx")]))
    with pytest.raises(VerificationError, match="a: does not match"):
        repository().download_into(tmp_path, COMMIT, repository().files(COMMIT))
    failed = OSError("Consistency check failed: file should be of size 1 but has size 2")  # of the client
    monkeypatch.setattr(HostileHub, "hf_hub_download", Mock(side_effect=failed))
    answer(HostileHub({}, []))
    with pytest.raises(VerificationError, match="sends more or fewer"):
        repository().download_into(tmp_path, COMMIT, listed)


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit", "none"])
@pytest.mark.parametrize("cached", [True, False])
def test_headers_of_a_hub_name_no_file_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, cached: bool
) -> None:
    """The client puts an ETag into a path of its cache: a Hub wrote any file of the user's."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    sent = {"ETag": '"0"', "X-Repo-Commit": COMMIT, header: '"../../../home/profile"'}

    class HostileHeaders(QuietHandler):
        """Answers every request with headers of which the Hub's client makes the name of a file."""

        def do_GET(self) -> None:
            self.send(200, b"hostile", **sent)

        do_HEAD = do_GET

    with served(HostileHeaders) as url:
        repository = RemoteRepository(REPOSITORY, endpoint=url, token="any")
        monkeypatch.setattr(
            repository.api,
            "snapshot_download",
            lambda *_, **options: repository.api.hf_hub_download(
                REPOSITORY, "a", repo_type="kernel", revision=options["revision"]
            ),
        )
        files = {"a": remote_repository.RemoteFile(7, "0", None)}
        with suppress(VerificationError) if header != "none" else nullcontext():
            if cached:
                repository.download(COMMIT, ["a"])
            else:
                repository.download_into(tmp_path / "local", COMMIT, files)
    assert not list((tmp_path / "home").iterdir())
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"hostile"]
    assert bool(written) == (header == "none")


def test_a_hub_sends_the_client_to_no_other_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client for Xet has no limits of time and memory."""
    assert importlib.util.find_spec("hf_xet")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    asked = []

    class XetHeaders(QuietHandler):
        """Sends clients to the address of a server for Xet."""

        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.do_GET()

        def do_GET(self) -> None:
            link = f'<http://{self.headers["Host"]}/xet>; rel="xet-auth"'
            self.send(200, b"x", ETag='"0"', X_Repo_Commit=COMMIT, X_Xet_Hash="b" * 64, Link=link)

    with served(XetHeaders) as url, suppress(HubError):
        repository = RemoteRepository(REPOSITORY, endpoint=url, token="any")
        repository.download_into(tmp_path, COMMIT, {"a": remote_repository.RemoteFile(1, "0", None)})
    assert asked and "/xet" not in asked


@SETTINGS
@given(some.lists(NAMES, min_size=1, max_size=4))
@example(["a", "a/b"])
@example(["../a"])
@example(["build/*/a", "build/a` | <img>/b", "build/torch-cpu/a"])
def test_names_lead_nowhere(
    tmp_path_factory: pytest.TempPathFactory, answer: Callable[[HostileHub], None], names: list[str]
) -> None:
    """Whatever a name is, every consumer stays in its directory, or refuses with an error that can be printed."""
    root = tmp_path_factory.mktemp("names")
    inside, outside = root / "inside", root / "outside"
    inside.mkdir()
    write_files(outside, {"file": "the user's"})

    def refused(consume: Callable[[], object]) -> None:
        try:
            consume()
        except (KernelBuilderError, UnsafePath) as error:
            str(error).encode()

    content = b"x"
    answer(HostileHub({}, [(name, content) for name in names]))
    refused(lambda: repository().download_into(inside / "files", COMMIT, repository().files(COMMIT)))
    refused(_read_variants)
    for number, name in enumerate(names):
        for kind, archive in (("wheel", _wheel), ("sdist", _sdist)):
            download, tree = inside / f"{kind}-{number}.part", inside / f"{kind}-{number}"
            download.write_bytes(data := archive(name, content))
            digest = hashlib.sha256(data).hexdigest()
            record = digest if kind == "wheel" else None
            pin = PinnedFile("p", "1", "p", digest, record, ((0, len(data)),), digest, "p/", ("",))
            refused(lambda pin=pin, download=download, tree=tree: archives.unpack(pin, download, tree))  # type: ignore[misc]
    assert [path.name for path in root.iterdir()] in (["inside", "outside"], ["outside", "inside"])
    assert (outside / "file").read_text() == "the user's" and len(list(outside.iterdir())) == 1
    with suppress(UnsafePath):
        for path in checked_tree(names):
            assert checked_path(path) == path
            assert (inside / path).resolve().is_relative_to(inside.resolve())


def _read_variants() -> None:
    """Read the packages that a branch has besides those of a publication, as for its card."""
    variants = publish._variants(repository().files(COMMIT))
    for name in publish._downloaded(repository(), COMMIT, variants):
        assert not set(name) & set("*?[]|`<>&\\/ \n")


def _wheel(name: str, content: bytes) -> bytes:
    """Return a member of a wheel, of any name."""
    encoded = f"p/{name}".encode(errors="surrogatepass")[:65535]
    sizes = (len(content), len(content), len(encoded), 0)
    return struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, *sizes) + encoded + content


def _sdist(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("p/" + name.replace("\0", ""))
        member.size = len(content)
        with suppress(UnicodeEncodeError):
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "source", ["(" * 10_000, f"x = {'-' * 100_000}1", "x = 1\0", b"\xff", "x" + ".a" * 50_000, "def f(:"]
)
def test_python_of_a_hub_that_is_none_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str | bytes
) -> None:
    """A branch has packages of others beside those of a publication, whose API is compared."""
    for name in ("__init__.py", "_ops.py"):
        (tmp_path / name).write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(PackageError, match="the package's Python files cannot be parsed"):
        package_api.read(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize("what", ["tree", "refs", "refs, compressed", "an error", "pages", "a package index"])
def test_answers_without_an_end_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ANSWER_BYTES", 1 << 20)
    left = iter(range(99))

    class Endless(QuietHandler):
        """Answers with eight megabytes, or with 99 empty pages."""

        def do_GET(self) -> None:
            if what == "pages":
                more = {"Link": f'<http://{self.headers["Host"]}/api/kernels?{next(left)}>; rel="next"'}
                self.send(200, b"[]", **more)
            elif what.endswith("compressed"):
                self.send(200, gzip.compress(b" " * (8 << 20)), Content_Encoding="gzip")
            else:
                self.send(404 if what == "an error" else 200, b" " * (8 << 20), Content_Type="text/html")

    with served(Endless) as url:
        hub = RemoteRepository(REPOSITORY, endpoint=url, token="any")
        calls = {"tree": lambda: hub.files(COMMIT), "pages": hub.kernels_of_owner}
        index = Index(url, retries=Retry(0))
        calls["a package index"] = lambda: index.packages("torch")  # type: ignore[assignment, return-value]
        with pytest.raises(KernelBuilderError, match="too long"):
            calls.get(what, hub.branches)()


FILE = {"type": "file", "path": "a", "oid": "0" * 40}


@pytest.mark.parametrize(
    "answer", [None, "x", FILE, *([{**FILE, "size": size}] for size in (-9, 6.5, "6", None, True))]
)
def test_malformed_lists_are_refused(answer: object) -> None:
    class Malformed(QuietHandler):
        """Answers every request with a list of a file, or with what is none."""

        def do_GET(self) -> None:
            self.send_json(200, answer)

    with served(Malformed) as url:
        hub = RemoteRepository(REPOSITORY, endpoint=url, token="any")
        for call in (hub.branches, lambda: hub.files(COMMIT)):
            with pytest.raises(KernelBuilderError):
                call()


def test_text_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"build/torch-cpu/big.py": remote_repository.RemoteFile(8 << 30, "0", "1" * 64)}
    with pytest.raises(VerificationError, match="too many to read"):
        partial_download.download(repository(), COMMIT, files, tmp_path)
    redirect = {"kernel-status.toml": files.popitem()[1]}
    monkeypatch.setattr(RemoteRepository, "files", lambda *_: redirect)
    monkeypatch.setattr(RemoteRepository, "read_range", lambda *_: b"")
    with pytest.raises(VerificationError, match="too many to read"):
        partial_download.package_files(repository(), COMMIT)


def test_reading_the_api_runs_no_program_of_the_package(tmp_path: Path) -> None:
    package, ran = write_files(tmp_path / "torch-cpu", {"__init__.py": "def double(x): ...\n"}), tmp_path / "ran"
    commit_all(package)
    git(package, "config", "core.fsmonitor", f"touch {ran}; false")
    assert [*package_api.read(package).members] == ["double"]
    assert not ran.exists()
