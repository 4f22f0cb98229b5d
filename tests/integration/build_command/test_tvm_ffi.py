"""Projects with `[tvm-ffi]`, whose binaries link TVM FFI and no Torch, are built, and the client loads them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from kernel_builder import elf
from tests.integration.build_command.conftest import Copy, NewCache, Run, run_python
from tests.support.files import replace, write_files, write_program
from tests.support.loopback import served
from tests.support.places import SOURCES

CPU, CUDA = "tvm-ffi01-cpu-x86_64-linux", "tvm-ffi01-cu130-x86_64-linux"


@pytest.fixture
def cache(shared_cache: Path) -> Path:
    return shared_cache


needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo: apt-get install cargo, or rustup")


@pytest.mark.parametrize("name", ["tvm-scale", pytest.param("rust-scale", marks=needs_cargo)])
def test_two_versions_load_in_one_process(copy_project: Copy, kernel_builder: Run, name: str) -> None:
    projects = [copy_project(name, f"scale-v{version}") for version in (1, 2)]
    replace(projects[1] / "build.toml", "version = 1", "version = 2")
    answer = kernel_builder.build(*projects, "--backend", "cpu")
    assert [built["variant"] for built in answer["packages"]] == [CPU, CPU]
    assert all("load" in built["passed-checks"] for built in answer["packages"]), answer
    assert not answer["warnings"], answer
    wheel = kernel_builder(kernel_builder.cache, "wheel", projects[0])
    assert wheel.code == 2 and "by the installed Torch" in wheel.answer["message"], wheel.answer
    packages = [str(project / "build" / CPU) for project in projects]
    assert run_python(SOURCES["load_tvm_ffi"], *packages).splitlines() == 2 * ["expected float32"]


def test_a_binary_for_cuda_has_the_runtime_itself(copy_project: Copy, kernel_builder: Run) -> None:
    """Nothing else brings it: tensors may be of another framework than Torch."""
    project = copy_project("tvm-scale")
    answer = kernel_builder.build(project, "--backend", "cuda", "--no-load")
    (package,) = answer["packages"]
    assert package["variant"] == CUDA and package["checks"]["findings"] == [], package
    (path,) = (project / "build" / CUDA).glob("*.so")
    binary = elf.read(path)
    assert "libtvm_ffi.so" in binary.needed and not [name for name in binary.needed if "cuda" in name]
    assert binary.exported == {"__tvm_ffi_scaled"}
    (elsewhere,) = (left for left in answer["unavailable"] if left["variant"] == CUDA.replace("130", "126"))
    assert "needs the static runtime of CUDA 12.6" in elsewhere["reason"] and "--cuda-home" in elsewhere["hint"]


def test_a_library_without_functions_is_refused(copy_project: Copy, kernel_builder: Run) -> None:
    project = copy_project("tvm-scale")
    (project / "tvm-ffi-ext" / "binding.cpp").write_text("int nothing() { return 0; }\n")
    (project / "scale" / "scale_cpu.cpp").write_text("")
    done = kernel_builder(kernel_builder.cache, "build", project, "--backend", "cpu", "--no-load")
    (finding,) = done.answer["failures"][0]["checks"]["findings"]
    assert finding["check"] == "python-abi" and finding["message"] == "exports no function of TVM FFI"
    assert "TVM_FFI_DLL_EXPORT_TYPED_FUNC" in finding["hint"]


@needs_cargo
def test_a_crate_gives_equal_bytes_in_any_directory(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    """Also without a sandbox. The exports are TVM FFI's alone, and no path of this machine is in the binary."""
    projects = [copy_project("rust-scale", f"in-{place}") for place in ("one", "another")]
    for project, sandbox in zip(projects, ("auto", "off"), strict=True):
        kernel_builder.build(project, "--no-load", "--sandbox", sandbox, cache=new_cache(sandbox))
    one, another = (next((project / "build" / CPU).glob("*.so")) for project in projects)
    assert (one.name, one.read_bytes()) == (another.name, another.read_bytes())
    assert elf.read(one).exported == {"__tvm_ffi_scaled"}
    assert str(projects[0].parent).encode() not in one.read_bytes()
    metadata = json.loads((one.parent / "metadata.json").read_text())["provenance"]
    assert metadata["rust-compiler"].startswith("rustc 1.")
    assert "vendor/scale-rows/src/lib.rs" in metadata["sources"]["files"]


@needs_cargo
def test_a_crate_that_cargo_refuses_is_an_error(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, cache = copy_project("rust-scale"), kernel_builder.cache
    replace(project / "crate/src/lib.rs", "factor.value.float as f32", "facto")
    (failed,) = kernel_builder(cache, "build", project).answer["failures"]
    assert "cannot find value `facto`" in failed["errors"][0]["message"]
    shutil.rmtree(project / "vendor")
    (failed,) = kernel_builder(cache, "build", project).answer["failures"]
    assert "cargo fetch" in failed["errors"][0]["hint"] and "vendor" in failed["errors"][0]["hint"]
    write_program(tmp_path / "rustc", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    refused = kernel_builder(cache, "build", project).answer
    assert "there is no Rust on PATH" in refused["message"] and "apt-get install cargo" in refused["hint"]
    (project / "Cargo.lock").unlink()
    assert "there is no Cargo.lock" in str(kernel_builder(cache, "check-config", project).answer)


@needs_cargo
@pytest.mark.attack
def test_crates_come_from_cargos_cache(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cargo fetch` filled it from a registry; the build has no network, and sees no other crate by its name."""
    project, home = copy_project("rust-scale"), tmp_path / "cargo"
    vendored, index = project / "vendor" / "scale-rows", tmp_path / "site" / "sc" / "al" / "scale-rows"
    (vendored / ".cargo-checksum.json").unlink()
    private = ["registry/src/host/private-1.0.0/lib.rs", "registry/index/host/config.json", "git/db/private/FETCH_HEAD"]
    paths = ", ".join(f'"{home}/{path}"' for path in private)
    program = f"fn main() {{ for path in [{paths}] {{ std::fs::read(path).expect_err(path); }} }}\n"
    write_files(vendored, {"build.rs": program})
    index.parent.mkdir(parents=True)
    with tarfile.open(tmp_path / "site" / "scale-rows.crate", "w:gz") as crate:
        crate.add(vendored, "scale-rows-1.0.0")
    shutil.rmtree(project / "vendor")
    checksum = hashlib.sha256((tmp_path / "site" / "scale-rows.crate").read_bytes()).hexdigest()
    entry = {"name": "scale-rows", "vers": "1.0.0", "deps": [], "features": {}, "cksum": checksum, "yanked": False}
    index.write_text(json.dumps(entry))
    (project / "Cargo.lock").unlink()
    with served(partial(SimpleHTTPRequestHandler, directory=tmp_path / "site")) as address:
        (tmp_path / "site" / "config.json").write_text(json.dumps({"dl": f"{address}/{{crate}}.crate"}))
        replaced = f'[source.crates-io]\nreplace-with = "local"\n\n[source.local]\nregistry = "sparse+{address}/"\n'
        (project / ".cargo" / "config.toml").write_text(replaced)
        fetched = ["cargo", "fetch", "--manifest-path", project / "Cargo.toml"]
        # rustup finds its toolchains in the user's home.
        subprocess.run(fetched, cwd=project, env={**os.environ, "CARGO_HOME": str(home)}, check=True)
    write_files(home, dict.fromkeys([*private, "registry/cache/host/private-1.0.0.crate"], ""))
    locked = (
        f'[[package]]\nname = "private"\nversion = "1.0.0"\nsource = "registry+{address}"\nchecksum = "{checksum}"\n'
    )
    (project / "crate" / "Cargo.lock").write_text(locked)  # which cargo does not read: the workspace has another
    monkeypatch.setenv("CARGO_HOME", str(home))
    kernel_builder.build(project, "--no-load")


@needs_cargo
@pytest.mark.attack
def test_objects_of_crates_come_from_this_machine(copy_project: Copy, kernel_builder: Run, new_cache: NewCache) -> None:
    """A build script may read files of its machine, which no key of a step covers."""
    shared = new_cache("shared")
    for cache in (shared, new_cache("own")):
        project = copy_project("rust-scale", f"in-{cache.name}")
        answer = kernel_builder.build(project, "--no-load", cache=cache, KERNEL_BUILDER_SHARED_CACHE=str(shared))
        assert answer["compiles"] == 1, answer
