"""Equal sources give equal bytes in any directory, with any cache, at any time; caches may be shared."""

from __future__ import annotations

import shutil
from pathlib import Path

from kernel_format.cache_directory import default_cache
from tests.integration.build_command.conftest import FOR_CPU, Copy, NewCache, Run, snapshot, untouched
from tests.support.files import replace

ODD = """it's "$HOME": a `name`; & {more}, 100%\nline gr\udcf6sser"""


def test_builds_are_bit_identical(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Two builds of a compiled and a Python-only project: another directory, cache, number of jobs, and environment.

    The first build may take its objects from the user's cache, the second has an empty one.

    Names of directories and sources are unusual. The sources ask the compiler for their path and for the time, and
    device code for the op namespace.
    """
    results = []
    refused = dict.fromkeys(("INCLUDES", "PTXAS_FLAGS", "NVCC_APPEND_FLAGS", "CCC_OVERRIDE_OPTIONS"), "--not-an-option")
    places = {"CPATH": "/", "GCC_EXEC_PREFIX": "/nowhere/", "COMPILER_PATH": "/nowhere", "LC_ALL": "tr_TR.utf8"}
    for name, jobs, variables in (("here", "1", {}), (f"somewhere/{ODD}", "3", refused | places)):
        cache = new_cache("empty") if variables else default_cache()
        stable = copy_project("stable-scale", f"{name}/stable")
        python = copy_project("python-only", f"{name}/python")
        for old, new in (("scale_cpu.cpp", "a b'$:,é;.cpp"), ("scale_cuda.cu", "it's a scale.cu")):
            source = (stable / "scale" / old).rename(stable / "scale" / new)
            replace(stable / "build.toml", old, new)
            with source.open("a") as stream:
                stream.write('const char* where = __FILE__ " " __DATE__ " " __TIME__ " " __TIMESTAMP__;\n')
                stream.write("void get_where(const char**out) { *out = where; }\n")
                if source.suffix == ".cu":
                    stream.write("#define QUOTED(x) #x\n#define EXPANDED(x) QUOTED(x)\n")
                    stream.write("__device__ const char name_on_the_device[] = EXPANDED(TORCH_EXTENSION_NAME);\n")
        kernel_builder.build(stable, python, "--no-load", "--jobs", jobs, cache=cache, **variables)
        results.append({**snapshot(stable / "build"), **snapshot(python / "build")})
    assert results[0].keys() == results[1].keys()
    assert [name for name in results[0] if results[0][name] != results[1][name]] == []
    assert any(name.endswith(".so") for name in results[0])


def test_outputs_of_a_shared_cache_are_copied_unless_they_are_damaged(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    """KERNEL_BUILDER_SHARED_CACHE names a second cache, which builds read and never write."""
    shared, first = new_cache("shared"), copy_project("stable-scale", "first")
    kernel_builder.build(first, *FOR_CPU, cache=shared)

    def build(name: str) -> tuple[int, int]:
        project, cache = copy_project("stable-scale", name), new_cache(f"{name}-cache")
        with untouched(shared / "objects"):
            answer = kernel_builder.build(project, *FOR_CPU, cache=cache, KERNEL_BUILDER_SHARED_CACHE=str(shared))
        assert snapshot(project / "build") == snapshot(first / "build")
        return answer["compiles"], answer["steps"]

    assert build("second") == (0, 0)
    shutil.rmtree(shared / "binaries")
    damaged, without_digest = sorted((shared / "objects").glob("*/*.o"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    without_digest.with_name(f"{without_digest.name}.sha256").unlink()
    assert build("third") == (2, 3)

    missing = tmp_path / "nothing"
    done = kernel_builder(shared, "build", first, *FOR_CPU, KERNEL_BUILDER_SHARED_CACHE=str(missing))
    assert done.code == 0, done
    assert f"warning: the shared cache {missing} is not used: its directory `objects` cannot be read" in done.stderr
