"""The include scan."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.backends.cuda import CUDA
from kernel_builder.steps.include_scan import Scan, scan
from kernel_format.errors import ConfigError
from tests.support.files import write_files
from tests.support.git import git

INCLUDES = toml_file.read(Path(__file__).with_name("includes.toml"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "a.cpp": '#include "lib/one.h"\n#include <vector>\n',
        "lib/one.h": '#pragma once\n#include "two.h"\n  #  include <inc/three.h>\n',
        "lib/two.h": '#include "one.h"\n',
        "other/inc/three.h": "int three;\n",
        "other/unused.h": "int unused;\n",
    }
    return write_files(tmp_path, files)


def names(scanned: Scan) -> list[str]:
    return [name for name, _ in scanned.files]


def test_includes_are_followed_through_directories_and_cycles(project: Path) -> None:
    assert names(scan(project, "a.cpp", ["other"])) == ["a.cpp", "lib/one.h", "lib/two.h", "other/inc/three.h"]
    assert names(scan(project, "a.cpp")) == ["a.cpp", "lib/one.h", "lib/two.h"]


def test_includes_are_followed_through_links(project: Path, tmp_path: Path) -> None:
    root = write_files(tmp_path / "kernels" / "one", {"a.cpp": '#include "kit/two.h"\n'})
    (root / "kit").symlink_to("../../lib")
    with pytest.raises(ConfigError, match="symbolic link out of the project"):
        scan(root, "a.cpp", ["."])
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "kernels", "lib")
    before = scan(root, "a.cpp", ["."])
    assert names(before) == ["a.cpp", "kit/one.h", "kit/two.h"]
    (project / "lib" / "two.h").write_text("int changed;\n")
    after = scan(root, "a.cpp", ["."])
    assert dict(before.files)["kit/two.h"] != dict(after.files)["kit/two.h"]


@pytest.mark.parametrize(("text", "torch"), INCLUDES["torch"])
def test_torch_is_seen_where_it_is_included(project: Path, text: str, torch: bool) -> None:
    (project / "b.cpp").write_text(text + "\n")
    assert scan(project, "b.cpp").torch is torch


@pytest.mark.parametrize("text", INCLUDES["seen"])
def test_an_include_is_seen_as_the_compiler_sees_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "h.h").write_text("")
    (tmp_path / "a.cpp").write_bytes(f"{text}\n".encode())
    assert names(scan(tmp_path, "a.cpp")) == ["a.cpp", "h.h"]


@pytest.mark.parametrize("part", ["/* ", '"\\', 'R"a(', "#include <"])
def test_the_scan_takes_linear_time(tmp_path: Path, part: str) -> None:
    """The first took half an hour: the search for an end that is missing began anew at every beginning."""
    (tmp_path / "a.cpp").write_text(part * 300_000)
    scan(tmp_path, "a.cpp")


@pytest.mark.parametrize("text", INCLUDES["assembler"])
def test_files_of_the_assembler_are_refused(project: Path, text: str) -> None:
    (project / "lib/two.h").write_text(text)
    with pytest.raises(ConfigError, match=f"^{project}/lib/two.h: reads a file with the assembler"):
        scan(project, "a.cpp")
    (project / "lib/two.h").write_text("// .incbin\nint a = options.include;\n")
    assert "lib/two.h" in names(scan(project, "a.cpp"))


@pytest.mark.parametrize("text", INCLUDES["asked"])
def test_headers_of_has_include_are_listed_unless_the_project_has_them(project: Path, text: str) -> None:
    (project / "b.cpp").write_text(text)
    assert "png.h" in scan(project, "b.cpp").asked
    (project / "png.h").write_text("")
    assert ("png.h" in scan(project, "b.cpp", ["."]).asked) == ("_next" in text)
    (project / "b.cpp").write_text('#define NAME "png.h"')
    assert scan(project, "b.cpp").asked == ()
    (project / "lib" / "b.cpp").write_text('#if __has_include("two.h") || __has_embed("../../x")')
    assert scan(project, "lib/b.cpp").asked == ("../../x",)


@pytest.mark.parametrize(("text", "message"), INCLUDES["refused"])
def test_files_that_no_reader_of_the_project_sees_are_refused(project: Path, text: str, message: str) -> None:
    precompiled = project / "lib" / "one.h.gch"
    if "any" in text:
        precompiled.mkdir()
        precompiled /= "any"
    precompiled.write_bytes(b"gpch\0")
    (project / "lib/two.h").write_text(text)
    with pytest.raises(ConfigError, match=message):
        scan(project, "a.cpp", ["lib"])


def test_torch_is_seen_through_the_projects_own_headers(project: Path) -> None:
    (project / "lib/two.h").write_text("#include <torch/torch.h>\nvoid f(decltype(TORCH_EXTENSION_NAME));\n")
    scanned = scan(project, "a.cpp")
    assert scanned.torch
    assert scanned.namespace
    assert not scanned.python


def test_a_computed_include_may_mean_any_listed_file(project: Path) -> None:
    (project / "c.cpp").write_text("#define HEADER <inc/three.h>\n#include HEADER\n")
    scanned = scan(project, "c.cpp", ["other"], ["c.cpp", "other/unused.h"])
    assert names(scanned) == ["c.cpp", "other/unused.h"]
    assert scanned.torch


def test_nothing_outside_the_project_is_read(project: Path) -> None:
    inner = project / "lib"
    (inner / "d.cpp").write_text('#include "../a.cpp"\n#include "../lib/two.h"\n')
    assert names(scan(inner, "d.cpp")) == ["d.cpp"]
    assert names(scan(project, "lib/d.cpp")) == ["a.cpp", "lib/d.cpp", "lib/one.h", "lib/two.h"]


def test_headers_that_need_the_cuda_libraries(tmp_path: Path) -> None:
    """A header of the project is not one of them."""
    (tmp_path / "curand.h").write_text("")
    needing = ("cublas_v2.h", "nvtx3/nvToolsExt.h", "ATen/cuda/CUDAContext.h", "cutlass/util/reference/device/fill.h")
    for header in (*needing, "cuda_runtime.h", "c10/cuda/CUDAStream.h", "cutlass/cutlass.h", "curand.h"):
        (tmp_path / "a.cu").write_text(f"#include <{header}>\n" if header != "curand.h" else '#include "curand.h"\n')
        found = scan(tmp_path, "a.cu", library_headers=CUDA.library_headers)
        assert found.toolkit_libraries is (header in needing), header
