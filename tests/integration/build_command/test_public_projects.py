"""Projects that the public builder accepts are built, and the client loads them."""

from __future__ import annotations

from pathlib import Path

import torch

from kernel_builder import elf
from kernel_builder.config.variant import Release
from tests.integration.build_command.conftest import LOAD, Copy, Run, run_python
from tests.support.files import append, replace, write_files
from tests.support.newest import full_abi
from tests.support.places import SOURCES


def test_a_project_that_only_the_public_builder_has_built(
    copy_project: Copy, shared_cache: Path, kernel_builder: Run
) -> None:
    """No edition, a source in two kernels, the stable ABI of 2.9, headers in csrc, and the GNU dialect.

    Sources of `[torch]` and of kernels find headers in csrc, after those in their `include` directories.
    """
    project = copy_project("stable-scale")
    file, binding = project / "build.toml", project / "torch-ext" / "torch_binding.cpp"
    file.write_text(file.read_text().replace("edition = 6\n", "").replace('language = "cpp-', 'backend = "'))
    replace(file, 'stable-abi = "2.10"', 'stable-abi = "2.9"')
    replace(file, 'include = ["."]', 'include = [".", "scale"]')
    again = 'src = ["scale/scale_cpu.cpp", "./scale/scale_cpu.cpp", "scale/scale.h", "scale/scale.h"]'
    append(file, f'[kernel.again]\nbackend = "cpu"\ndepends = []\n{again}\n')
    other = "#error the one of `include` comes first\n"
    write_files(project / "csrc", {"api/limits.h": "#define LIMIT 8\n", "scale.h": other})
    for source in (binding, project / "scale" / "scale_cpu.cpp"):
        # `typeof` is of GNU's dialect, which is CMake's default.
        source.write_text(f'#include "api/limits.h"\nstatic_assert(typeof(LIMIT){{8}} == LIMIT);\n{source.read_text()}')
    replace(binding, '"scale/scale.h"', '"scale.h"')
    replace(binding, '"registration.h"', '"../torch-ext/registration.h"')
    variant = "torch-stable-abi29-cpu-x86_64-linux"
    done = kernel_builder(shared_cache, "build", project, "--variant", variant, "--no-load")
    assert done.code == 0, done
    assert "torch-stable-abi" in done.answer["packages"][0]["checks"]["passed"]
    assert any("no edition" in notice for notice in done.answer["notices"])
    assert done.stderr.count("update-build DIR") == 1
    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"


def test_a_module_of_the_name_of_the_package(copy_project: Copy, kernel_builder: Run) -> None:
    """The directory for old clients would hide the module, so the package has none."""
    project = copy_project("python-only")
    package = project / "torch-ext" / "python_only"
    (package / "__init__.py").rename(package / "python_only.py")
    (package / "__init__.py").write_text("from .python_only import doubled\n\n__all__ = ['doubled']\n")
    kernel_builder.build(project, "--backend", "cpu", "--no-load")
    built = project / "build" / "torch-cpu"
    assert (built / "python_only.py").read_bytes() == (package / "python_only.py").read_bytes()
    assert not (built / "python_only").exists()
    assert run_python(SOURCES["load_python_kernel"], project) == "[2.0, 2.0]"


def test_the_package_and_its_modules_import_by_name(copy_project: Copy, kernel_builder: Run) -> None:
    """Tests import a package by its Python name, beside the client: each of its modules is loaded once."""
    project = copy_project("python-only")
    package = project / "torch-ext" / "python_only"
    (package / "__init__.py").rename(package / "ops.py")
    (package / "__init__.py").write_text(
        "from .ops import doubled\n\n__all__ = ['doubled']\n__version__ = '7'\n_hidden = 1\n\n\n"
        "def leaf_of():\n    from .inner import leaf\n\n    return leaf\n"
    )
    leaf = "import sys\n\nsys.imported.append('leaf')\n"
    write_files(package / "inner", {"__init__.py": "", "leaf.py": leaf})
    kernel_builder.build(project, "--backend", "cpu", "--no-load")
    for order in (("by_name", "by_client", "by_path"), ("by_client", "by_name"), ("by_path", "by_client", "by_name")):
        assert run_python(SOURCES["import_by_name"], project, *order) == "No module named 'python_only.missing'"


def test_the_full_abi_before_the_stable_abi(copy_project: Copy, shared_cache: Path, kernel_builder: Run) -> None:
    """One command builds for the installed Torch on the full C++ ABI, also with nvcc, and for later ones."""
    installed = Release.parse(".".join(torch.__version__.split(".")[:2]))
    later = Release(installed.major, installed.minor + 1)
    project = copy_project("stable-scale")
    replace(project / "build.toml", 'stable-abi = "2.10"', f'stable-abi = "{later}"\nminver = "{installed}"')
    source = project / "scale" / "scale_cuda.cu"
    replace(project / "scale" / "scale.h", "#pragma once", '#pragma once\n__asm__(".symver powf,powf@GLIBC_2.2.5");')
    replace(source, "void scale(", "float power(float x) { return powf(x, x); }\n\nvoid scale(")
    full, stable = full_abi(installed, "cpu"), f"torch-stable-abi{later.digits}-cpu-x86_64-linux"
    cuda = full_abi(installed, "cu130")
    chosen = [option for variant in (full, stable, cuda) for option in ("--variant", variant)]
    answer = kernel_builder.build(project, *chosen, cache=shared_cache)
    packages = {built["variant"]: built for built in answer["packages"]}
    assert packages.keys() == {full, stable, cuda}
    assert "load" in packages[full]["passed-checks"] and "torch-stable-abi" in packages[stable]["passed-checks"]
    binaries = {name: elf.read(next((project / "build" / name).glob("*.so"))) for name in packages}
    assert ("powf", "GLIBC_2.2.5") in [(symbol.name, symbol.version) for symbol in binaries[cuda].undefined]
    needed = {name: binary.needed for name, binary in binaries.items()}
    assert "libtorch.so" in needed[full] and "libtorch.so" not in needed[stable]
    assert "libcuda.so.1" not in needed[cuda], "which calls no function of the driver"
    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"
