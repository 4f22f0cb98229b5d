"""Local development: devshell, testshell and installation by pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.integration.build_command.conftest import BUILDER, FOR_CPU, Copy, Run, command, environment, run_python
from tests.support.files import replace, write_files
from tests.support.places import CPU, CUDA, SOURCES

REPOSITORY = '[general.hub]\nrepo-id = "org/stable-scale"\n\n[torch]'


def test_a_testshell_loads_the_built_package(copy_project: Copy, shared_cache: Path) -> None:
    project, cache = copy_project("stable-scale"), shared_cache
    replace(project / "build.toml", "[torch]", REPOSITORY)
    missing = command(cache, "testshell", project, "--", "program", "--json")
    assert missing.returncode == 6 and f"kernel-builder build {project}" in missing.stderr
    Run(cache).build(project, *FOR_CPU)
    done = command(cache, "testshell", project, "--", "python", "-c", SOURCES["load_by_name"])
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == [str(project / "build" / CPU / "__init__.py"), "2.0", "3.0"]

    other = command(cache, "testshell", project, "--variant", CUDA)
    assert other.returncode == 6 and f"{CUDA}: the variant has not been built" in other.stderr
    write_files(project, {"build/torch210-cxx11-cpu-x86_64-linux/metadata.json": "{}"})
    # The Torch of this interpreter does not fit.
    refused = command(cache, "testshell", project, "--variant", "torch210-cxx11-cpu-x86_64-linux")
    assert refused.returncode == 4 and "pip install 'torch==2.10.*' --index-url" in refused.stderr


def test_the_shell_is_that_of_the_user(copy_project: Copy, cache: Path) -> None:
    """A shell without a command is $SHELL; SIGPIPE ends its programs, as in any shell."""
    devshell = [str(BUILDER), "devshell", str(copy_project("python-only"))]
    env = environment(cache, SHELL="/bin/sh")
    done = subprocess.run(devshell, input="yes | head -1\n", capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "y\n" and "`exit` leaves this shell" in done.stderr


def test_a_devshell_has_the_pinned_toolchain(copy_project: Copy, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = copy_project("stable-scale")
    script = (
        "nvcc --version && $CXX -std=c++17 -fsyntax-only -DCUDA_KERNEL -DTORCH_EXTENSION_NAME=ops "
        "-DTORCH_TARGET_VERSION=0x020a000000000000 -I. torch-ext/torch_binding.cpp && echo compiled && echo $CUDA_HOME"
    )
    arguments = ["devshell", project, "--variant", CUDA, "--", "sh", "-c", f"cd {project} && {script}"]
    done = command(cache, *arguments)
    assert done.returncode == 0, done.stderr
    *words, compiled, home = done.stdout.splitlines()
    assert any("release 13.0" in line for line in words)
    assert compiled == "compiled"
    # A build in the shell uses the toolchain and the cached objects of a build outside.
    monkeypatch.setenv("CUDA_HOME", str(toolkits.toolkit(Toolchains(), Release(13, 0)).root))
    assert Path(home).name == Path(os.environ["CUDA_HOME"]).name and toolkits.installed(Toolchains()) is None


def test_pip_installs_a_project(copy_project: Copy, shared_cache: Path, tmp_path: Path) -> None:
    project, cache = copy_project("stable-scale"), shared_cache
    call = (
        "import sys, torch, stable_scale; print(stable_scale.__file__, stable_scale.scaled(torch.ones(1), 2.0).item())"
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-index", "--no-deps"]
    assert command(cache, "create-pyproject", project).returncode == 0

    def installed(site: Path, *arguments: str | Path) -> list[str]:
        subprocess.run([*pip, *arguments], check=True, env=environment(cache), stdout=subprocess.DEVNULL)
        (directory,) = [site, *site.glob("**/site-packages")][-1:]
        code = f"import site; site.addsitedir({str(directory)!r}); {call}"
        return run_python(code).split()

    package = project / "build" / CPU / "__init__.py"  # by its Python name it is the same module
    assert installed(tmp_path / "one", "--prefix", tmp_path / "one", "--editable", project) == [str(package), "2.0"]
    copied = tmp_path / "two" / "stable_scale" / "__init__.py"
    assert installed(tmp_path / "two", "--target", tmp_path / "two", project) == [str(copied), "2.0"]

    file = project / "pyproject.toml"
    file.write_text(file.read_text() + "# mine\n")
    assert command(cache, "create-pyproject", project).returncode == 2
    assert command(cache, "create-pyproject", project, "--force").returncode == 0 and "mine" not in file.read_text()
