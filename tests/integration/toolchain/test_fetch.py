"""Fetching a tree from an index into the store, every error on the way, and the choice of the index."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release, this_platform
from kernel_builder.toolchain import Toolchains, lock
from kernel_builder.toolchain.index import Index, configured_url
from kernel_format.errors import FetchError, StoreError
from tests.support.files import write_files
from tests.support.programs import wait_for

from .index_server import CUTLASS, Fault, IndexServer

pytestmark = pytest.mark.attack

CUDA = Release(13, 0)
TORCH = Release(2, 10)

MACHINE = this_platform().partition("-")[0]
NVCC = f"nvidia_cuda_nvcc-13.0.88-py3-none-manylinux2014_{MACHINE}.manylinux_2_17_{MACHINE}.whl"
TORCH_WHEEL = f"torch-2.10.1-3-cp310-cp310-manylinux_2_28_{MACHINE}.whl"

Start = Callable[..., "subprocess.Popen[str]"]
Make = Callable[..., Toolchains]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def fetched_with_cuda(pinned: lock.Lock) -> int:
    """Return the bytes of the compiler and of the headers of CUDA's libraries."""
    names = ("cuda-13.0", "cuda-libraries-13.0")
    return sum(pin.download for name in names for pin in pinned[name][this_platform()].files)


def assert_only_finished_trees(cache: Path) -> None:
    store = cache / "toolchains"
    assert not list(store.glob("trees/.*")), "a tree was left half made"
    assert not list(store.glob("scratch/*")), "downloads were left"


def test_a_cuda_tree_has_the_files_of_the_wheels_except_libnvvm(
    toolchains: Make, server: IndexServer, pinned: lock.Lock, cache: Path, unpacked: Callable[[str], dict[str, bytes]]
) -> None:
    toolkit = toolkits.toolkit(toolchains(), CUDA)
    got = files_of(toolkit.root)
    expected = {
        name.removeprefix("nvidia/cu13/"): data
        for wheel in pinned["cuda-13.0"][this_platform()].files
        for name, data in unpacked(wheel.file).items()
        if name.startswith("nvidia/cu13/")
    }
    assert got == {name: data for name, data in expected.items() if name != "lib/libnvvm.so.4"}
    assert (toolkit.version, toolkit.origin) == ("13.0.2", "index")
    modes = {name: stat.S_IMODE((toolkit.root / name).stat().st_mode) for name in got}
    assert modes["bin/nvcc"] == modes["bin/ptxas"] == modes["nvvm/bin/cicc"] == 0o555
    assert modes["bin/nvcc.profile"] == modes["include/cuda_runtime.h"] == 0o444
    assert server.sent == sum(wheel.download for wheel in pinned["cuda-13.0"][this_platform()].files)
    assert_only_finished_trees(cache)


def test_stable_headers_are_a_small_part_of_the_full_headers(
    toolchains: Make, server: IndexServer, unpacked: Callable[[str], dict[str, bytes]]
) -> None:
    every = {
        name.removeprefix("torch/include/"): data
        for name, data in unpacked(TORCH_WHEEL).items()
        if name.startswith("torch/include/")
    }
    stable = toolchains().torch(TORCH, "stable")
    assert server.sent < 10_000
    wanted = ("ATen/Config.h", "torch/csrc/stable/library.h", "torch/headeronly/version.h")
    assert files_of(stable.include[0]) == {name: every[name] for name in wanted}
    full = toolchains().torch(TORCH, "full")
    assert files_of(full.include[0]) == every
    assert full.include[1] == full.include[0] / "torch/csrc/api/include"
    assert stable.identity != full.identity


def test_header_libraries_from_a_wheel_and_from_two_source_distributions(toolchains: Make) -> None:
    expected = {name for name in CUTLASS if not name.startswith("media/")} | {"include/cutlass/version.h"}
    for name, major in (("cutlass_3_8", b"3"), ("cutlass_4_0", b"4")):
        library = toolchains().dependency(name)
        assert set(files_of(library.root)) == expected
        assert library.include == (library.root / "include", library.root / "tools/util/include")
        assert b"MAJOR " + major in (library.root / "include/cutlass/version.h").read_bytes()


def test_stored_trees_need_no_network(toolchains: Make, server: IndexServer) -> None:
    cold = toolchains(offline=True)
    with pytest.raises(FetchError, match="not in the store") as caught:
        toolkits.toolkit(cold, CUDA)
    assert "toolchain fetch" in (caught.value.hint or "")
    first = toolkits.toolkit(toolchains(), CUDA)
    server.stop()
    assert toolkits.toolkit(toolchains(offline=True), CUDA) == first == toolkits.toolkit(toolchains(), CUDA)


def test_a_download_continues_after_a_broken_connection(
    toolchains: Make, server: IndexServer, pinned: lock.Lock
) -> None:
    server.faults[NVCC] = Fault(times=2, cut=1_000_000)
    toolkits.toolkit(toolchains(), CUDA)
    requests = [request for request in server.requests if request.file == NVCC]
    wheel = next(wheel for wheel in pinned["cuda-13.0"][this_platform()].files if wheel.file == NVCC)
    assert len(requests) == 3
    again = sum(request.sent for request in requests) - wheel.download
    assert 0 <= again < 100_000, "bytes were downloaded twice"


@pytest.mark.parametrize("fault", [Fault(times=2, status=503), Fault(no_ranges=True)])
def test_a_busy_server_and_one_without_range_requests_work(toolchains: Make, server: IndexServer, fault: Fault) -> None:
    server.faults[TORCH_WHEEL] = fault
    assert b"stable" in (toolchains().torch(TORCH, "stable").include[0] / "torch/csrc/stable/library.h").read_bytes()


@pytest.mark.parametrize(
    ("file", "fetch"),
    [
        (NVCC, lambda tools: toolkits.toolkit(tools, CUDA)),
        ("kernels-2.0.tar.gz", lambda tools: tools.dependency("cutlass_4_0")),
    ],
)
def test_an_altered_download_is_reported_and_removed(
    toolchains: Make, server: IndexServer, cache: Path, file: str, fetch: Callable[[Toolchains], object]
) -> None:
    server.faults[file] = Fault(flip=len(server.files[file]) // 2)
    with pytest.raises(FetchError, match="differs from the lock: it has SHA-256") as caught:
        fetch(toolchains())
    assert file in str(caught.value) and "expected" in caught.value.message
    kept = [path.name for path in cache.glob("toolchains/scratch/*/*")]
    assert not any(name.startswith(("nvidia-cuda-nvcc", "kernels")) for name in kept), "the download was kept"
    assert not list(cache.glob("toolchains/trees/*"))
    del server.faults[file]
    fetch(toolchains())
    assert_only_finished_trees(cache)


@pytest.mark.parametrize("fault", [Fault(cut=0), Fault(endless=True)])
def test_a_body_without_its_bytes_or_without_an_end_is_an_error_or_cut(
    toolchains: Make, server: IndexServer, cache: Path, fault: Fault
) -> None:
    server.faults[NVCC] = fault
    if fault.endless:
        toolkits.toolkit(toolchains(), CUDA)
    else:
        with pytest.raises(FetchError):
            toolkits.toolkit(toolchains(), CUDA)
    assert len(server.requests) < 20
    assert sum(request.sent for request in server.requests) < 30_000_000


def test_another_file_of_the_name_or_none_is_rejected_before_the_download(
    toolchains: Make, server: IndexServer
) -> None:
    server.stated[NVCC] = "f" * 64
    with pytest.raises(FetchError, match=r"f{64}, expected"):
        toolkits.toolkit(toolchains(), CUDA)
    assert not [request for request in server.requests if request.file == NVCC]
    del server.files[NVCC]
    with pytest.raises(FetchError, match="does not have it") as caught:
        toolkits.toolkit(toolchains(), CUDA)
    assert NVCC in str(caught.value) and server.url in str(caught.value)


def test_after_kill_9_in_a_download_only_the_missing_bytes_are_fetched(
    start: Start, server: IndexServer, pinned: lock.Lock, cache: Path
) -> None:
    server.faults[NVCC] = Fault(rate=2_000_000)
    process = start("fetch", "cuda-13.0", "cuda-libraries-13.0")

    def kept() -> int:
        return sum(path.stat().st_size for path in cache.glob("toolchains/scratch/*/nvidia-cuda-nvcc*"))

    assert wait_for(lambda: kept() > 500_000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(cache.glob("toolchains/trees/[!.]*"))
    before = kept()
    wheels = pinned["cuda-13.0"][this_platform()].files
    assert before < sum(wheel.download for wheel in wheels)

    del server.faults[NVCC]
    server.requests.clear()
    process = start("fetch", "cuda-13.0", "cuda-libraries-13.0")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert server.sent == fetched_with_cuda(pinned) - before
    assert_only_finished_trees(cache)


def test_two_processes_download_once(start: Start, server: IndexServer, pinned: lock.Lock) -> None:
    slow = server.faults[NVCC] = Fault(rate=50_000)
    first = start("fetch", "cuda-13.0", "cuda-libraries-13.0")
    assert wait_for(lambda: any(r.file == NVCC for r in server.requests))
    second = start("fetch", "cuda-13.0", "cuda-libraries-13.0")
    assert second.stderr and "waiting for another process" in second.stderr.readline()
    slow.rate = None
    for process in (first, second):
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert server.sent == fetched_with_cuda(pinned)


def test_a_store_that_cannot_be_written(toolchains: Make, tmp_path: Path, cache: Path) -> None:
    toolchains().torch(TORCH, "stable")
    if os.geteuid() == 0:  # root ignores permissions, but not a read-only mount
        bind = ["mount", "--bind", "-o", "ro", str(cache), str(cache)]
        if subprocess.run(bind, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount read-only")
        undo = ["umount", str(cache)]
    else:
        subprocess.run(["chmod", "-R", "a-w", str(cache)], check=True)
        undo = ["chmod", "-R", "u+w", str(cache)]
    try:
        assert toolchains().torch(TORCH, "stable").identity, "stored trees can still be read"
        with pytest.raises(StoreError, match="cannot be written") as caught:
            toolchains().torch(TORCH, "full")
        assert str(cache) in str(caught.value)
        assert "KERNEL_BUILDER_CACHE" in (caught.value.hint or "")
    finally:
        subprocess.run(undo, check=True)


def test_the_index_that_pip_or_uv_is_set_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for file, name in (("xdg/pip/pip.conf", "file"), ("named.conf", "named")):
        write_files(tmp_path, {file: f"[global]\nindex-url = http://from.{name}/simple\n"})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    expected = [
        ("PIP_CONFIG_FILE", str(tmp_path / "named.conf"), "http://from.named/simple"),
        ("UV_INDEX_URL", "http://from.uv/simple", "http://from.uv/simple"),
        ("UV_DEFAULT_INDEX", "http://from.uv2/simple", "http://from.uv2/simple"),
        ("PIP_INDEX_URL", "http://from.pip/simple", "http://from.pip/simple"),
    ]
    for name, *_ in expected:
        monkeypatch.delenv(name, raising=False)
    assert configured_url() == "http://from.file/simple"
    for name, value, url in expected:  # each setting takes precedence over those above it
        monkeypatch.setenv(name, value)
        assert configured_url() == url


def test_credentials_are_sent_to_the_index_only_and_never_shown(
    wheel_files: dict[str, bytes], pinned: lock.Lock, tmp_path: Path
) -> None:
    wheel = pinned["torch-2.10-stable"][this_platform()].files[0]
    with (
        IndexServer(dict(wheel_files)) as files,  # on another port
        IndexServer(dict(wheel_files), password=("me", "secret"), file_server=files) as server,
    ):
        url = server.url.replace("//", "//me:secret@")
        index = Index(url)
        index.fetch(wheel, tmp_path / "part")
        assert (tmp_path / "part").stat().st_size == wheel.download
        assert {request.authorization for request in files.requests} == {None}
        with pytest.raises(FetchError) as caught:
            index.packages("no-such-project")
        assert "secret" not in str(caught.value)
        with pytest.raises(FetchError, match="401"):
            Index(server.url).packages("torch")
