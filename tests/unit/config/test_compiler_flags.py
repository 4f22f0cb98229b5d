"""Which compiler flags a project may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.backends.cuda import CUDA
from kernel_builder.config import compiler_flags
from kernel_builder.config.project import Kernel
from kernel_format.errors import ConfigError


def check(*, cxx: tuple[str, ...] = (), cuda: tuple[str, ...] = ()) -> None:
    kernel = Kernel(
        name="scale", backend=CUDA, depends=("torch",), src=("a.cu",), include=(), cxx_flags=cxx, cuda_flags=cuda
    )
    compiler_flags.check(Path("project"), "kernel.scale", "cxx-flags", kernel.cxx_flags)
    CUDA.check_flags(Path("project"), "kernel.scale", kernel)


def test_flags_of_public_projects_are_allowed() -> None:
    host = ("-O3", "-std=c++20", '-DA="b c"', "-UNDEBUG", "-Wno-deprecated-declarations", "-fopenmp", "-mavx512f")
    check(cxx=(*host, "-march=x86-64-v3", "-fbracket-depth=1024", "-lgomp", "-g", "-D", "A=1"))
    check(cuda=("-static-global-template-stub=false", "--ftz", "true", "-src-in-ptx", "-Wreorder", "-split-compile=0"))
    check(
        cuda=(*host, "--use_fast_math", "--expt-relaxed-constexpr", "-lineinfo", "--threads=4", "-t", "4", "-res-usage")
    )
    check(
        cuda=("-Xptxas=-v,-O3", "-Xptxas", "-dlcm=ca", "-Xfatbin=-compress-all", "-Xcompiler=-fPIC,-O2", "-std=c++17")
    )
    check(
        cuda=(
            "-diag-suppress=174",
            "--diag-suppress",
            "177",
            "--maxrregcount=64",
            "-gencode",
            "arch=compute_90a,code=sm_90a",
        )
    )


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("-shared", "is for the link"),
        ("-rdc=true", "needs a device link"),
        ("-ptx", "one object of each source"),
        ("--keep", "writes files beside the object"),
    ],
)
def test_options_of_nvcc_are_refused_with_a_reason(flag: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(cuda=(flag,))


def test_include_options_for_the_project_are_told_apart() -> None:
    flags = ("-O2", "-I./inc/", "-I", "a/b", "-I../up", "-I/opt/x", "--include-path=c", "-I.")
    assert compiler_flags.split_includes(flags) == (("-O2", "-I../up", "-I/opt/x"), ("inc", "a/b", "c", "."))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("-wrapper,evil", "runs another program"),
        ("-B/tmp/evil", "chooses other programs"),
        ("@/tmp/options", "reads options from a file"),
        ("-fplugin=/tmp/evil.so", "loads code"),
        ("-I/opt/include", "outside of the project"),
        ("-fprofile-use=/tmp/profile", "profile"),
        ("-fuse-ld=evil", "runs another program"),
        ("/tmp/evil.o", "is an input file"),
        ("-Wa,@/tmp/options", "known to read no other file"),
        ("-fmodule-mapper=localhost:1", "asks another program"),
        ("-fcompare-debug=-Bsrc", "known to read no other file"),
        ("-mllvm", "loads code"),
        ("-D", "known to read no other file"),
        ("-DX=\0cuda\0", "known to read no other file"),
    ],
)
def test_flags_that_run_programs_or_read_files_are_refused(flag: str, reason: str) -> None:
    for flags in (
        {"cxx": (flag,)},
        {"cuda": (flag,)},
        {"cuda": (f"-Xcompiler={flag}",)},
        {"cuda": ("-Xcompiler", flag)},
    ):
        with pytest.raises(ConfigError) as caught:
            check(**flags)
        assert caught.value.where.startswith("project/build.toml: [kernel.scale] c")
        if "," not in flag or "Xcompiler" not in str(flags):  # nvcc splits there
            assert reason in caught.value.message


@pytest.mark.parametrize(
    "flags",
    [
        ("-ccbin=/tmp/evil",),
        ("--options-file=/tmp/x",),
        ("-optf", "/tmp/x"),
        ("-Xptxas=--options-file=/tmp/x",),
        ("-run",),
        ("-time",),
    ],
)
def test_flags_of_nvcc_that_run_programs_or_read_files_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is refused"):
        check(cuda=flags)


@pytest.mark.parametrize(
    "flags",
    [("-march=native",), ("--gpu-architecture=native",), ("-Xcompiler", "-march=native,-O3")],
)
def test_native_instruction_sets_are_refused_wherever_they_are_named(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="makes a binary for the machine that builds it"):
        check(cuda=flags)


@pytest.mark.parametrize("value", ["@src/csrc/options.h", "-std=c++11", "-wrapper"])
def test_a_macro_is_a_name_not_options_of_a_file(value: str) -> None:
    # g++ replaces `@file` by the options in the file before it reads any.
    for name in ("-D", "-U"):
        for flags in ({"cxx": (name, value)}, {"cuda": (name, value)}):
            with pytest.raises(ConfigError, match="is refused"):
                check(**flags)


SHELL = ("$(touch ran)", "`touch ran`", "$HOME", "\\\\")


@pytest.mark.parametrize("value", [*SHELL, "a;touch ran", "a b", "*", "<a", '"a"'])
def test_flags_of_nvcc_mean_nothing_to_its_shell(value: str) -> None:
    for flags in (("-Xcompiler=-DA=" + value,), ("-Xcompiler", "-DA=" + value), ("--compiler-options", "-DA=" + value)):
        with pytest.raises(ConfigError, match="nvcc passes it to a shell") as caught:
            check(cuda=flags)
        assert caught.value.where == "project/build.toml: [kernel.scale] cuda-flags"
    for flags in ((f"-DA={value}",), ("-D", f"A={value}")):
        if value in SHELL:
            with pytest.raises(ConfigError, match="nvcc passes it to a shell"):
                check(cuda=flags)
        else:
            check(cuda=flags)
        check(cxx=flags)  # g++ runs no shell
