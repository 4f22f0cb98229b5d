"""Builds of a project give packages that the unmodified client loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from kernels import Metadata  # type: ignore[attr-defined]

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_format.cache_directory import default_cache
from kernel_format.errors import ConfigError, PackageError
from kernel_format.files import locked
from tests.integration.build_command.conftest import (
    BUILDER,
    LOAD,
    Copy,
    Run,
    assert_refused,
    environment,
    run_python,
    untouched,
)
from tests.support.files import append, replace, write_files, write_program
from tests.support.places import CPU, CUDA, SOURCES
from tests.support.programs import run
from tests.support.python_project import write_project


def test_stable_abi_project(copy_project: Copy, kernel_builder: Run) -> None:
    """Variants share binaries; the client loads the result; a second build runs no step."""
    project = copy_project("stable-scale", "a project, größer")
    answer = kernel_builder.build(project, "--all", "--no-load", cache=default_cache())
    packages = {package["variant"]: package for package in answer["packages"]}
    # For the CPU, clang, and nvcc of three releases.
    assert len({package["module"] for package in packages.values()}) == 5
    assert len(packages) == 30
    assert CPU in packages["torch213-cxx11-cpu-x86_64-linux"]["shares-binary-with"]
    missing = {variant["variant"]: variant for variant in answer["unavailable"]}
    assert missing and all(name.endswith("-aarch64-linux") for name in missing)
    assert "torch-stable-abi210-cpu-aarch64-linux" in missing

    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"
    assert (
        run_python(SOURCES["load_as_old_clients_do"], project / "build" / CPU / "stable_scale" / "__init__.py")
        == "[6.0]"
    )
    metadata = Metadata.read_from_file(project / "build" / CUDA / "metadata.json")
    assert metadata.id == packages[CUDA]["module"]
    assert metadata.backend.archs == ["9.0"]

    again = kernel_builder.build(project, "--all", "--no-load", cache=default_cache())
    assert again["steps"] == 0
    assert {package["status"] for package in again["packages"]} == {"unchanged"}


def test_a_changed_source_recompiles_itself_and_the_binding_and_both_versions_load(
    copy_project: Copy, kernel_builder: Run
) -> None:
    project, options = copy_project("stable-scale"), ("--backend", "cpu", "--no-load")
    before = kernel_builder.build(project, *options, "--out", project / "one")
    unused = kernel_builder.cache / "objects" / "aa" / f"{64 * 'a'}.o"
    other = kernel_builder.cache / "packages" / "mine.py"  # the cache is a directory with files of the user
    for path in (unused, other):
        write_files(path.parent, [path.name])
    used = [path for kind in ("binaries", "packages") for path in (kernel_builder.cache / kind).rglob("*.*")]
    for path in (unused, *used):
        os.utime(path, (0, 0))
    # One build finds its package unchanged, the other its binary in the cache.
    for out in ("one", "two"):
        assert kernel_builder.build(project, *options, "--out", project / out)["steps"] == 0
    replace(project / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * in[i] + 1")
    after = kernel_builder.build(project, *options)
    assert (after["compiles"], after["steps"]) == (2, 3)
    # A build removes outputs that no build has used for a month.
    assert not unused.exists() and len(used) == 4 and all(path.exists() for path in used)
    assert after["packages"][0]["module"] != before["packages"][0]["module"]
    assert run_python(SOURCES["load_two"], project / "one", project / "build") == "2.0 3.0"

    append(project / "torch-ext" / "stable_scale" / "__init__.py", "# changed\n")
    # Two versions of the Python files must not register under one namespace, so the binding is compiled again.
    renamed = kernel_builder.build(project, *options)
    assert (renamed["compiles"], renamed["steps"]) == (1, 2)


def test_an_installed_toolkit_compiles_for_one_capability(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path
) -> None:
    """The toolkit is a copy of the pinned one, whose nvcc records that it runs. Such packages are for local use."""
    pinned, toolkit, calls = toolkits.toolkit(Toolchains(), Release(13, 0)).root, tmp_path / "cuda", tmp_path / "calls"
    shutil.copytree(pinned, toolkit, copy_function=os.symlink)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.parent.chmod(0o755)
    nvcc.unlink()
    write_program(nvcc, f'echo "$@" >> {calls}\nexec {pinned}/bin/nvcc "$@"')
    project = copy_project("stable-scale")
    replace(project / "build.toml", '["9.0"]', '["8.0", "9.0a"]')
    options = ("--variant", CUDA, "--no-load", "--cuda-home", toolkit, "--sandbox", "off", "--capability", "9.0")
    kernel_builder.build(project, *options)
    assert "scale_cuda.cu" in calls.read_text()
    metadata = json.loads((project / "build" / CUDA / "metadata.json").read_text())
    assert metadata["backend"]["archs"] == ["9.0a"]
    assert metadata["provenance"]["capabilities-limited"] == ["9.0"]

    upload = kernel_builder(kernel_builder.cache, "upload", project, "--repo-id", "org/stable-scale", "--dry-run")
    assert_refused(upload, (PackageError, CUDA, "built with --capability 9.0", "without --capability"))
    wrong = (ConfigError, "--capability", "'9.0a' is not", "9.0 selects 9.0a")
    kernel_builder.refuse(project, "--capability", "9.0a", expected=wrong)


def test_one_command_builds_several_projects(
    copy_project: Copy, shared_cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    """Packages of another kernel are not replaced."""
    first, second, out = copy_project("stable-scale"), copy_project("python-only"), tmp_path / "out"
    options = ("--backend", "cpu", "--no-load")
    kernel_builder.build(first, second, *options, "--out", out, cache=shared_cache)
    assert sorted(path.name for path in out.iterdir()) == ["python-only", "stable-scale"]
    assert (out / "python-only" / "torch-cpu" / "metadata.json").is_file()

    other, expected = write_project(tmp_path / "two"), (PackageError, out, "another kernel than two", "--out")
    with untouched(out):
        kernel_builder.refuse(other, *options, "--out", out / "python-only", expected=expected)


@pytest.mark.attack
def test_a_build_at_the_same_time_does_not_replace_packages(copy_project: Copy, tmp_path: Path) -> None:
    """They have other caches. Both find an empty destination, and wait for its lock."""
    first, second, out = copy_project("python-only"), write_project(tmp_path / "second"), tmp_path / "out"
    out.mkdir()
    options = ("--backend", "cpu", "--no-load", "--out", out)
    with locked(out / ".lock"):
        builds = [
            subprocess.Popen([BUILDER, "build", project, *options], env=environment(tmp_path / f"cache-{project.name}"))
            for project in (first, second)
        ]
        while not all(out / ".lock" in map(Path.resolve, Path(f"/proc/{build.pid}/fd").iterdir()) for build in builds):
            assert not any(build.poll() for build in builds)
            time.sleep(0.05)
    assert sorted(build.wait() for build in builds) == [0, PackageError.exit_code]


def test_other_files_in_build_are_kept(copy_project: Copy, kernel_builder: Run, tmp_path: Path) -> None:
    project, place = copy_project("python-only"), tmp_path / "python-only" / "build" / "torch-cpu"
    expected = (PackageError, "build/torch-cpu", "is not a package", "move or remove")
    write_files(place, {"notes.txt": "mine"})
    kernel_builder.refuse(project, "--backend", "cpu", "--no-load", expected=expected)
    shutil.rmtree(place)
    place.symlink_to(tmp_path)
    kernel_builder.refuse(project, "--backend", "cpu", "--no-load", expected=expected)
    place.unlink()

    old = project / "build" / "torch29-cxx11-cpu-x86_64-linux"
    kept = {
        "notes/mine.txt": "mine",
        "data/metadata.json": '{"rows": 3}',
        "torch29-cxx98-cpu-x86_64-linux/metadata.json": "-",
    }
    write_files(project / "build", {**kept, f"{old.name}/metadata.json": "{}"})
    kernel_builder.build(project, "--variant", "torch-cpu", "--no-load")
    assert old.exists()
    kernel_builder.build(project, "--no-load")
    # The project no longer offers this variant, so a full build removes it.
    assert {path.name for path in (project / "build").iterdir()} - {"torch-cpu", "torch-cuda"} == {
        name.partition("/")[0] for name in kept
    }
    assert all((project / "build" / name).read_text() == text for name, text in kept.items())
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "torch-ext"]


ABSENT = "PyTorch and the client cannot be imported: no Torch here"


def test_a_package_that_could_not_be_loaded_is_loaded_later(
    copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    project = copy_project("python-only")
    init = project / "torch-ext/python_only/__init__.py"
    sound = init.read_text()
    init.write_text("import os\n\nos.kill(os.getpid(), 11)\n")
    hidden = write_files(tmp_path / "hidden", {"torch/__init__.py": "raise ImportError('no Torch here')\n"})
    without = {"PYTHONPATH": f"{hidden}:{Path(__file__).parents[3]}"}
    arguments = ("build", project, "--variant", "torch-cpu")

    done = kernel_builder(cache, *arguments, **without)
    (built,) = done.answer["packages"]
    assert (done.code, built["status"], built["skipped-checks"]["load"]) == (0, "built", ABSENT)
    assert "load" not in built["passed-checks"]
    _, row, why, last = run(BUILDER, *arguments, env=environment(cache, **without)).splitlines()
    assert "unchanged" in row and row.endswith("5 passed, load skipped")
    assert why == f"not loaded here: torch-cpu: {ABSENT}"
    assert last.startswith("1 variant from 0 binaries; 0 files compiled")

    done = kernel_builder(cache, *arguments)
    assert (done.code, done.answer["error"]) == (7, "CheckError")
    assert "the process was killed by SIGSEGV" in done.answer["message"]

    init.write_text(sound)
    done = kernel_builder(cache, *arguments, "--no-load")
    assert done.answer["packages"][0]["skipped-checks"]["load"] == "--no-load"
    assert "load" in kernel_builder(cache, *arguments).answer["packages"][0]["passed-checks"]
    assert kernel_builder(cache, *arguments).answer["packages"][0]["status"] == "unchanged"
