"""`kernel-builder port` reads a setup.py without running it, and says what it does not carry over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernel_builder.cli import main
from kernel_builder.config.project_files import read_project

SETUP = """
import glob
import os
import os.path as osp
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

Path("ran.txt").write_text("setup.py was run")
here = os.path.dirname(os.path.abspath(__file__))
version = subprocess.check_output(["nvcc", "-V"]).decode()
debug = os.getenv("DEBUG", "0") == "1"
archs = ["-gencode", "arch=compute_80,code=sm_80"]
if version >= "12.8":
    archs += ["-gencode", "arch=compute_120,code=sm_120", "-gencode", "arch=compute_120,code=compute_120"]
if sys.platform == "win32":
    raise RuntimeError("not here")


def get_extensions(directory="csrc"):
    use_cuda = torch.cuda.is_available() and CUDA_HOME is not None
    kind = CUDAExtension if use_cuda else CppExtension
    sources = glob.glob(osp.join(directory, "*.cpp"))
    macros = [("WITH_TWO", "2")]
    flags = {"cxx": ["-O3" if not debug else "-O0", "-fopenmp"], "nvcc": ["-O3", "--use_fast_math"] + archs}
    if use_cuda:
        sources += sorted(str(path) for path in Path(here, directory, "cuda").glob("*.cu"))
        macros.append(("WITH_CUDA", None))
    name = [path[len(directory) + 1 : -4] for path in sources][0]
    return [
        kind(
            f"fused.{name}",
            sources,
            include_dirs=[Path(here) / directory, "../elsewhere", *os.environ["INCLUDES"].split(":")],
            define_macros=macros,
            extra_compile_args=flags,
            libraries=["cublas"],
        )
    ]


setup(
    name="Fused_Ops",
    version="2.1",
    license="Apache 2.0",
    install_requires=["torch", "scipy>=1"],
    packages=find_packages(),
    ext_modules=get_extensions(),
    cmdclass={"build_ext": BuildExtension},
)
"""
BINDING = """#include <torch/extension.h>
#include "fused.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("fused", &fused); }
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "csrc/cuda").mkdir(parents=True)
    (tmp_path / "csrc/fused.cpp").write_text(BINDING)
    (tmp_path / "csrc/fused.h").write_text('#pragma once\n#include "cuda/launch.h"\n#include <vector>\n')
    (tmp_path / "csrc/cuda/launch.h").write_text("#pragma once\n")
    (tmp_path / "csrc/cuda/fused_cuda.cu").write_text('#include "../fused.h"\n')
    return tmp_path


def port(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["port", *map(str, args)])


def as_json(*args: str | Path) -> dict[str, Any]:
    result = port(*args, "--json")
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.stdout)
    return read


def line(words: str) -> int:
    return next(number for number, text in enumerate(SETUP.splitlines(), 1) if words in text)


def test_what_is_known_becomes_a_project(project: Path) -> None:
    result = port(project / "setup.py", "--name", "org/fused-ops")
    assert result.exit_code == 0, result.output
    assert not (project / "ran.txt").exists(), "a setup.py is never run"
    read = read_project(project)
    assert (read.name, read.license, read.hub_repo_id, read.version) == ("fused-ops", "apache-2.0", "org/fused-ops", 1)
    assert tuple(map(str, read.backends)) == ("cuda", "cpu"), "on a machine without CUDA the same call is for the CPU"
    cuda, cpu = read.kernels
    assert cuda.src == ("csrc/fused.cpp", "csrc/cuda/fused_cuda.cu", "csrc/cuda/launch.h", "csrc/fused.h")
    assert cpu.src == ("csrc/fused.cpp", "csrc/cuda/launch.h", "csrc/fused.h")
    assert (cuda.name, cpu.name) == ("fused_cuda", "fused_cpu")
    assert cuda.cuda_capabilities == ("8.0", "12.0+PTX")
    assert cuda.include == cpu.include == ("csrc",)
    assert cuda.cuda_flags == ("-DWITH_TWO=2", "-DWITH_CUDA", "--use_fast_math")
    assert cuda.cxx_flags == ("-DWITH_TWO=2", "-DWITH_CUDA", "-fopenmp")
    assert cpu.cxx_flags == ("-DWITH_TWO=2", "-fopenmp")
    assert [name for name, _ in read.python_files] == ["__init__.py"]


def test_what_is_not_known_is_listed_with_its_line(project: Path) -> None:
    report = as_json(project, "--dry-run")
    left_out = {(entry["line"], entry["text"]) for entry in report["left-out"]}
    call = line("kind(")
    assert left_out == {
        (call, "libraries: the builder links what docs/linking.md lists, and nothing else"),
        (call, "include_dirs: '../elsewhere' is outside the directory of setup.py"),
        (line("INCLUDES"), "include_dirs: `os.environ['INCLUDES'].split(':')` is only known when setup.py runs"),
    }
    assert [entry["line"] for entry in report["assumed"]] == [line("12.8")]
    assert {(entry["path"], entry["line"]) for entry in report["rewrites"]} == {
        ("csrc/fused.cpp", 1),
        ("csrc/fused.cpp", 4),
    }
    assert any(note.startswith("the package requires scipy: a kernel may import") for note in report["notes"])
    assert all(f"setup.py:{number}: " in report["files"]["build.toml"] for number, _ in left_out)
    shown = port(project, "--dry-run").output
    assert f"left out: setup.py:{call}: libraries" in shown
    assert "to change: csrc/fused.cpp:4: PYBIND11_MODULE" in shown
    assert sorted(path.name for path in project.iterdir()) == ["csrc", "setup.py"]


def test_a_file_that_exists_is_kept(project: Path) -> None:
    (project / "build.toml").write_text("# mine\n")
    result = port(project / "setup.py")
    assert result.exit_code == 2
    assert "has build.toml already" in result.output
    assert (project / "build.toml").read_text() == "# mine\n"
    assert not (project / "torch-ext").exists()


def test_a_python_package_that_exists_is_kept(project: Path) -> None:
    package = project / "torch-ext/fused_ops"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("# mine\n")
    assert as_json(project / "setup.py")["written"] == ["build.toml"]
    assert (package / "__init__.py").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("from setuptools import setup\nsetup(name='x', packages=['x'])\n", "declares no extension"),
        ("from torch.utils.cpp_extension import *\nCUDAExtension('a', open('list').read().split())\n", "no extension"),
        ("setup(name='x'\n", "is not Python"),
        ("x = " + "1 + " * 900 + "1\n", "is nested too deeply"),
        (None, "there is no such file"),
    ],
)
def test_nothing_understood_writes_nothing(tmp_path: Path, script: str | None, message: str) -> None:
    if script is not None:
        (tmp_path / "setup.py").write_text(script)
    result = port(tmp_path / "setup.py")
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "build.toml").exists()


def test_pyproject_completes_it(tmp_path: Path) -> None:
    call = "from torch.utils import cpp_extension\ncpp_extension.CppExtension(name='a._C', sources=['a.cpp'])\n"
    (tmp_path / "setup.py").write_text(call)
    (tmp_path / "a.cpp").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "small-ops"\nlicense = "MIT"\n')
    assert port(tmp_path / "setup.py").exit_code == 0
    read = read_project(tmp_path)
    assert (read.name, read.license, tuple(map(str, read.backends))) == ("small-ops", "mit", ("cpu",))
    assert read.kernels[0].name == "a_C_cpu"


def test_flags_for_the_stable_abi_become_its_key(tmp_path: Path) -> None:
    target = "'-DTORCH_TARGET_VERSION=0x020a000000000000'"
    (tmp_path / "setup.py").write_text(
        "from torch.utils.cpp_extension import CUDAExtension\n"
        f"CUDAExtension('a', ['a.cu'], extra_compile_args=[{target}, '-lineinfo', '--threads', '4'])\n"
    )
    (tmp_path / "a.cu").write_text("")
    assert port(tmp_path / "setup.py").exit_code == 0
    read = read_project(tmp_path)
    assert "stable_abi={<back end cuda>: Release(major=2, minor=10)}" in repr(read.framework)
    assert read.kernels[0].cuda_flags == ("-lineinfo",)
    assert read.license == "other"


STRANGE = """
import os, torch
from torch.utils.cpp_extension import CppExtension, CUDAExtension

here = os.path.dirname(os.path.abspath(__file__))
info = torch.__config__.parallel_info()
openmp = ["-fopenmp"] if torch.backends.openmp.is_available() else []
if "backend: OpenMP" in info and "OpenMP not found" not in info and sys.platform != "darwin":
    openmp += ["-DAT_PARALLEL_OPENMP"]
if "AVX512" in cpu_capability() and sys.platform != "darwin":
    openmp += ["-Wextra"]
flags = ["-O3", *openmp, f"-I{here}/inc", "-I/home/me/lib", "-ObjC++", "-Wall", "-L/opt"]
extensions = [
    CUDAExtension(
        "svox2.csrc", ["a.cu", "b.mm"], extra_compile_args={"cxx": flags, "nvcc": ["-Xptxas", "-v", "-shared"]}
    )
]
if torch.backends.mps.is_available():
    extensions.append(CppExtension("svox2.metal", ["c.cpp"]))
setup(name="svox2", install_requires=["torch", "einops", "apache-tvm-ffi>=0.1"], ext_modules=extensions)
"""


def test_what_strangers_write(tmp_path: Path) -> None:
    """Flags that a build refuses are listed, names keep their digits, and what is for Metal is not for the CPU."""
    (tmp_path / "setup.py").write_text(STRANGE)
    (tmp_path / "README.md").touch()
    (tmp_path / "inc").mkdir()
    (tmp_path / "lib").mkdir()
    for name in ("b.mm", "c.cpp"):
        (tmp_path / name).touch()
    (tmp_path / "a.cu").write_text(
        '#include <torch/python.h>\nstatic auto r = torch::RegisterOperators();\nm.def("svox2::a(Tensor x)");\n'
    )
    (tmp_path / ".gitmodules").write_text('[submodule "lib"]\n\tpath = lib\n\turl = https://example.org/lib\n')
    report = as_json(tmp_path, "--name", "me/svox2")
    read = read_project(tmp_path)
    assert (read.name, read.python_depends) == ("svox2", ("einops", "tvm-ffi"))
    assert list(map(str, read.backends)) == ["cuda"]
    (kernel,) = read.kernels
    cxx_flags = ("-fopenmp", "-DAT_PARALLEL_OPENMP", "-Wall")
    assert (kernel.include, kernel.cxx_flags, kernel.cuda_flags) == (("inc",), cxx_flags, ("-Xptxas", "-v"))
    (assumed,) = {entry["text"] for entry in report["assumed"]}
    assert assumed == "`'AVX512' in cpu_capability() and sys.platform != 'darwin'` is taken as False"
    left_out = " ".join(entry["text"] for entry in report["left-out"])
    for words in ("'/home/me/lib' is outside", "'-ObjC++' is refused", "-L/opt", "'-shared' is", "'b.mm' is for Metal"):
        assert words in left_out, words
    assert any(note.startswith("README.md becomes the page") for note in report["notes"])
    assert any(note.startswith("lib is a git submodule, and empty") for note in report["notes"])
    assert {entry["line"] for entry in report["rewrites"]} == {1, 2, 3}
    assert any("REGISTER_EXTENSION(TORCH_EXTENSION_NAME)" in note for note in report["notes"])
    assert CliRunner().invoke(main, ["check-config", str(tmp_path)]).exit_code == 0
