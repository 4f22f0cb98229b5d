"""Equal sources give equal bytes in any directory, with any cache, at any time."""

from __future__ import annotations

from tests.integration.build_command.conftest import (
    Copy,
    NewCache,
    Run,
    snapshot,
)


def test_builds_are_bit_identical(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Two builds of a compiled and a Python-only project: another directory, cache, number of jobs, and environment.

    The sources ask the compiler for their path and for the time, and device code for the op namespace.
    """
    results = []
    refused = dict.fromkeys(("INCLUDES", "PTXAS_FLAGS", "NVCC_APPEND_FLAGS", "CCC_OVERRIDE_OPTIONS"), "--not-an-option")
    taken = {
        **refused,
        "CPATH": "/",
        "GCC_EXEC_PREFIX": "/nowhere/",
        "COMPILER_PATH": "/nowhere",
        "LC_ALL": "tr_TR.utf8",
    }
    for name, jobs, variables in (("here", "1", {}), ("somewhere/else", "3", taken)):
        cache = new_cache(f"cache-{jobs}")
        stable = copy_project("stable-scale", f"{name}/stable")
        python = copy_project("python-only", f"{name}/python")
        for source in ("scale_cpu.cpp", "scale_cuda.cu"):
            with (stable / "scale" / source).open("a") as stream:
                stream.write('const char* where = __FILE__ " " __DATE__ " " __TIME__ " " __TIMESTAMP__;\n')
                stream.write("void get_where(const char**out) { *out = where; }\n")
                if source.endswith(".cu"):
                    stream.write("#define QUOTED(x) #x\n#define EXPANDED(x) QUOTED(x)\n")
                    stream.write("__device__ const char name_on_the_device[] = EXPANDED(TORCH_EXTENSION_NAME);\n")
        arguments = ("--no-load", "--jobs", jobs)
        done = kernel_builder(cache, "build", stable, python, *arguments, **variables)
        assert done.code == 0, done
        results.append({**snapshot(stable / "build"), **snapshot(python / "build")})
    assert results[0].keys() == results[1].keys()
    assert [name for name in results[0] if results[0][name] != results[1][name]] == []
    assert any(name.endswith(".so") for name in results[0])
