"""Reading a project: every value is read, and each mistake is reported with its place and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.backends.cpu import CPU
from kernel_builder.backends.cuda import CUDA
from kernel_builder.backends.rocm import ROCM
from kernel_builder.config import project
from kernel_builder.config.project import Kernel, KernelDependency, TorchFramework, TorchNoarch, TvmFfi
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release
from tests.support.sample_project import MINIMAL, WHOLE, mistake, write_project


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def test_every_value_is_read(home: Path) -> None:
    (home / "build.toml").write_text(WHOLE)
    package = home / "torch-ext/my_relu"
    stable = Release(2, 10)
    assert read_project(home) == project.Project(
        root=home,
        name="my-relu",
        version=3,
        license="mit",
        backends=(CUDA, CPU),
        upstream=("https://github.com/o/up",),
        source="git@github.com:o/src.git",
        python_depends=("einops",),
        backend_python_depends={CUDA: ("nvidia-cutlass-dsl",)},
        kernel_depends=(KernelDependency("o/base", version=2),),
        backend_kernel_depends={CUDA: (KernelDependency("o/more", revision="main"),)},
        backend_settings={CUDA: {"minver": Release(12, 8), "maxver": Release(13, 2)}},
        hub_repo_id="o/my-relu",
        hub_branch="v3",
        framework=TorchFramework(
            src=("torch-ext/binding.cpp",),
            include=("inc", "."),
            pyext=("py", "json"),
            cxx_flags=("-Wall",),
            minver=stable,
            maxver=Release(2, 15),
            stable_abi={CUDA: stable, CPU: stable},
        ),
        kernels=(
            Kernel(
                name="relu",
                backend=CUDA,
                depends=("torch", "cutlass_4_0"),
                src=("relu.cu", "inc/relu.h"),
                include=("inc",),
                cxx_flags=("-g",),
                cuda_capabilities=("9.0a", "12.0+PTX"),
                cuda_flags=("-lineinfo",),
                cuda_minver=Release(12, 8),
            ),
            Kernel(
                name="relu-rocm",
                backend=ROCM,
                depends=(),
                src=("relu.cu",),
                rocm_archs=("gfx942",),
                hip_flags=("-O2",),
            ),
        ),
        python_files=(
            ("__init__.py", package / "__init__.py"),
            ("data/table.json", package / "data/table.json"),
            ("layers/__init__.py", package / "layers/__init__.py"),
        ),
    )
    assert read_project(home).python_name == "my_relu"


def test_other_frameworks(home: Path) -> None:
    general = MINIMAL[: MINIMAL.index("[torch]")]
    (home / "build.toml").write_text(f'{general}[torch-noarch]\ncuda_capabilities = ["9.0"]\n')
    assert read_project(home).framework == TorchNoarch(cuda_capabilities=("9.0",))
    (home / "torch-ext").rename(home / "tvm-ffi-ext")
    (home / "build.toml").write_text(f'{general}[tvm-ffi]\nsrc = ["relu.cpp"]\n')
    read = read_project(home)
    assert read.framework == TvmFfi(src=("relu.cpp",))
    assert [name for name, _ in read.python_files] == ["__init__.py", "layers/__init__.py"]


def test_stable_abi_by_backend(home: Path) -> None:
    text = MINIMAL.replace("[torch]", '[torch]\nstable-abi = { cuda = "2.9" }').replace('["cpu"]', '["cpu", "cuda"]')
    (home / "build.toml").write_text(f'{text}[kernel.g]\nbackend = "cuda"\ndepends = []\nsrc = ["relu.cu"]\n')
    framework = read_project(home).framework
    assert isinstance(framework, TorchFramework)
    assert framework.stable_abi == {CUDA: Release(2, 9)}


@pytest.mark.parametrize(
    ("old", "new", "where", "message", "hint"),
    [
        ('license = "', 'licence = "', "[general] licence", "unknown key", "did you mean `license`?"),
        ("[torch]", "[torhc]", "[torhc]", "unknown key", "did you mean `torch`?"),
        ('license = "apache-2.0"\n', "", "[general] license", "is missing", "add it"),
        ('["relu.cpp"]', '"relu.cpp"', "[kernel.relu] src", "expected an array, got a string", "`src = [ … ]`"),
        ('["relu.cpp"]', '["rleu.cpp"]', "[kernel.relu] src", "no file 'rleu.cpp' in the project", "relative to"),
        ("[torch]", '[torch]\ninclude = ["/usr"]', "[torch] include", "'/usr' is not a path inside", "relative to"),
        ('["cpu"]', "[]", "[general] backends", "is an empty array", 'backends = ["cpu", "cuda"]'),
        ('["cpu"]', '["cdua"]', "[general] backends", "'cdua' is not a backend", "did you mean `cuda`?"),
        ("[torch]", "[torch]\nminver = 2.10", "[torch] minver", "expected a string, got a number", "in quotes"),
        ("[torch]", '[torch]\nminver = "2"\nmaxver = "1"', "[torch] minver", "no version is at least 2.0", "swap them"),
        ("[torch]", "[torch-noarch]\n[torch]", "", "got torch and torch-noarch", "keep one"),
        ('[torch]\nsrc = ["torch-ext/binding.cpp"]', "", "", "expected one framework table of [torch]", "add one of"),
        ("version = 1", "version = ", "", "is not TOML: Invalid value (at line 3, column 11)", "correct the line"),
    ],
)
def test_a_mistake_is_reported(home: Path, old: str, new: str, where: str, message: str, hint: str) -> None:
    assert old in MINIMAL
    error = mistake(home, MINIMAL.replace(old, new, 1))
    assert error.where == f"{home / 'build.toml'}: {where}".removesuffix(": ")
    assert message in error.message
    assert hint in str(error.hint)
    assert error.exit_code == 2


def test_not_utf8(home: Path) -> None:
    (home / "build.toml").write_bytes(MINIMAL.encode() + "# é\n".encode("latin-1"))
    assert "line 15 is not UTF-8" in mistake(home).message


def test_notices_are_in_the_warnings(home: Path) -> None:
    text = MINIMAL.replace("edition = 5\n", "").replace('["relu.cpp"]', '["relu.cpp", "./relu.cpp", "inc/relu.h"]')
    text += '[kernel.more]\nbackend = "cpu"\ndepends = []\nsrc = ["relu.cpp", "inc/relu.h", "inc/relu.h"]\n'
    text += '[kernel.cuda]\nbackend = "cuda"\ndepends = []\nsrc = ["relu.cu"]\ncuda-capabilities = ["9.0", "11.8"]\n'
    (home / "build.toml").write_text(text)
    edition, *rest = read_project(home).warnings
    assert edition.startswith("build.toml has no edition")
    assert "\n" not in edition
    assert rest == [
        "[kernel.cuda] cuda-capabilities: no known CUDA compiles for 11.8; it is skipped",
    ]
    (home / "build.toml").write_text(MINIMAL)
    assert read_project(home).warnings == ()
