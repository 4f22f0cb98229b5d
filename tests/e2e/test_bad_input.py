"""Wrong input is refused with its place and a hint, and the project stays unchanged. All through the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel_builder.config.variant import Release, this_platform
from kernel_builder.toolchain import lock
from tests.conftest import CPU, CUDA
from tests.e2e.conftest import BUILDER, Done, Run, environment
from tests.toolchain.index_server import Fault, IndexServer

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]

GLIBC = tuple(int(part) for part in (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[1].split("."))


def snapshot(directory: Path) -> dict[str, bytes | str]:
    """Return everything below a directory, hidden entries too: content of files, targets of links, directories."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else "directory"
    return found


@contextmanager
def untouched(*directories: Path) -> Iterator[None]:
    """Assert that the block changes nothing below the directories, to the byte."""
    before = [snapshot(directory) for directory in directories]
    yield
    assert [snapshot(directory) for directory in directories] == before


def assert_refused(done: Done, code: int, error: str, *, where: str, says: str, hint: str) -> None:
    """Assert that a build failed with this error, and that each text is part of its field."""
    assert done.code == code, done
    got = done.answer
    assert got["error"] == error, done
    assert where in got["where"], done
    assert says in got["message"], done
    assert hint in (got["hint"] or ""), done


@pytest.fixture
def project(copy_project: Copy) -> Path:
    """Return a project with an earlier package in its `build`."""
    copied = copy_project("stable-scale")
    package = copied / "build" / CPU
    package.mkdir(parents=True)
    (package / "metadata.json").write_text("{}")
    return copied


@pytest.fixture
def cache(new_cache: NewCache) -> Path:
    return new_cache("cache")


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "where", "says", "hint"),
    [
        ("license", "licence", "build.toml: [general] licence", "unknown key", "did you mean `license`?"),
        ("version = 1", 'version = "1"', "build.toml: [general] version", "expected an integer", "an integer"),
        ("scale_cpu.cpp", "scael.cpp", "build.toml: [kernel.scale_cpu] src", "no file 'scale/scael.cpp'", "relative"),
        ("scale/scale_cpu.cpp", "../scale.cpp", "[kernel.scale_cpu] src", "not a path inside", "without `..`"),
        ('["."]', '["/usr/include"]', "build.toml: [torch] include", "not a path inside", "relative to"),
        ("stable-scale", "../scale", "build.toml: [general] name", "not a name of small letters", "my-kernel"),
        ('["9.0"]', '["9.1"]', "[kernel.scale_cuda] cuda-capabilities", "'9.1' is not a CUDA capability", "8.9, 9.0"),
        ('["cpu", "cuda"]', "[]", "build.toml: [general] backends", "empty", 'backends = ["cpu", "cuda"]'),
    ],
)
def test_a_mistake_in_build_toml(
    project: Path, cache: Path, kernel_builder: Run, old: str, new: str, where: str, says: str, hint: str
) -> None:
    replace(project / "build.toml", old, new)
    with untouched(project):
        done = kernel_builder(cache, "build", project)
    assert_refused(done, 2, "ConfigError", where=f"{project}/", says=says, hint=hint)
    assert where in done.answer["where"]


@pytest.mark.parametrize(
    ("content", "says", "hint"),
    [
        (b"# K\xfcche\n", "line 1 is not UTF-8", "encoding UTF-8"),
        (b"# ten megabytes\n" * 650_000, "larger than 1 MB", "a few kB"),
        (b"[general\n", "is not TOML", "correct the line"),
        (None, "there is no such file, so this is not a kernel project", "kernel-builder init"),
    ],
)
def test_a_build_toml_that_cannot_be_read(
    project: Path, cache: Path, kernel_builder: Run, content: bytes | None, says: str, hint: str
) -> None:
    file = project / "build.toml"
    file.unlink() if content is None else file.write_bytes(content)
    with untouched(project):
        done = kernel_builder(cache, "build", project)
    assert_refused(done, 2, "ConfigError", where=str(file), says=says, hint=hint)


def test_a_directory_that_does_not_exist(cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    done = kernel_builder(cache, "build", tmp_path / "nothing")
    assert_refused(done, 2, "ConfigError", where="nothing/build.toml", says="no such file", hint="name the directory")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("link", ["scale/scale_cpu.cpp", "scale/scale.h", "scale/unlisted.h"])
def test_a_link_out_of_the_project(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path, link: str) -> None:
    """A listed or included file must be inside the project."""
    file, outside = project / link, tmp_path / "outside.h"
    if link.endswith("unlisted.h"):
        replace(project / "scale" / "scale.h", "#pragma once", '#pragma once\n#include "unlisted.h"')
        outside.write_text("")
    else:
        file.rename(outside)
    file.symlink_to(outside)
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu")
    assert_refused(
        done, 2, "ConfigError", where=str(project), says="link out of the project", hint="copy what it points"
    )
    assert link in str(done.answer)


def test_a_header_by_its_absolute_path(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text("")
    replace(project / "scale" / "scale_cpu.cpp", "#include", f'#include "{tmp_path}/mine.h"\n#include')
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu")
    assert_refused(
        done, 2, "ConfigError", where="scale/scale_cpu.cpp", says="by an absolute path", hint="copy it into the project"
    )


@pytest.mark.parametrize(
    ("table", "backend"),
    [('[general.cuda]\nmaxver = "9.0"\n', "cuda"), ('minver = "3.0"\n', "cpu")],
)
def test_a_range_with_no_variant_left(
    project: Path, cache: Path, kernel_builder: Run, table: str, backend: str
) -> None:
    if backend == "cpu":
        replace(project / "build.toml", 'stable-abi = "2.10"', table)
    else:
        replace(project / "build.toml", "[torch]", f"{table}[torch]")
    with untouched(project):
        done = kernel_builder(cache, "build", project)
    assert_refused(
        done, 3, "VariantError", where="minver, maxver", says=f"leave no {backend} variant", hint="widen the range"
    )


@pytest.mark.parametrize(
    ("variant", "says", "hint"),
    [
        ("torch-stable-abi210-cpo-x86_64-linux", "is not a variant's name; expected for example", "list-variants"),
        ("torch-stable-abi211-cpu-x86_64-linux", "the project's stable ABI for cpu is 2.10", CPU),
        ("torch-stable-abi210-cu126-x86_64-linux", "cannot be built here: the lock has no compiler", "--cuda-home"),
        ("torch-stable-abi210-cpu-aarch64-linux", "cannot be built here: this machine is x86_64", "with aarch64-linux"),
        ("torch-cpu", "no Python-only variants", CPU),
        ("", "is not a variant's name", "list-variants"),
    ],
)
def test_a_variant_that_cannot_be(
    project: Path, cache: Path, kernel_builder: Run, variant: str, says: str, hint: str
) -> None:
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU, "--variant", variant)
    assert_refused(done, 3, "VariantError", where=variant, says=says, hint=hint)


def test_no_compiler(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu", PATH=str(empty), CXX="")
        named = kernel_builder(cache, "build", project, "--backend", "cpu", "--cxx", "no-such-g++")
    assert_refused(done, 4, "ToolchainError", where="g++", says="g++ 11 or newer", hint="apt-get install g++")
    assert_refused(named, 4, "ToolchainError", where="no-such-g++", says="no such program", hint="--cxx")


@pytest.mark.parametrize("how", ["PATH", "--cxx", "CXX"])
def test_a_compiler_that_is_too_old(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path, how: str) -> None:
    real = shutil.which("g++")
    old = tmp_path / "bin" / "g++"
    old.parent.mkdir()
    old.write_text(f'#!/bin/sh\ncase "$*" in *-dumpfullversion*) echo 9.4.0;; *) exec {real} "$@";; esac\n')
    old.chmod(0o755)
    arguments = ["--cxx", str(old)] if how == "--cxx" else []
    more = {"PATH": {"PATH": f"{old.parent}:{os.environ['PATH']}"}, "CXX": {"CXX": str(old)}}.get(how, {})
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu", *arguments, **more)
    assert_refused(done, 4, "ToolchainError", where=str(old), says="is g++ 9.4.0, expected 11", hint="gcc-toolset")


def test_no_ninja(project: Path, cache: Path, tmp_path: Path) -> None:
    """In a virtual environment that has all packages and no programs."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    inner = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    outer = Path(pytest.__file__).parent.parent
    (inner / "outer.pth").write_text(f"import site; site.addsitedir({str(outer)!r})\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("g++", "gcc", "as", "ld", "ar", "nm", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    command = [
        python,
        "-c",
        "from kernel_builder.cli import main; main()",
        "build",
        project,
        "--variant",
        CPU,
        "--json",
    ]
    with untouched(project):
        done = subprocess.run(
            [*command, "--compiler-cache", "off", "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment(cache, PATH=str(programs), HOME=str(tmp_path)),
        )
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == 4
    assert (answer["error"], answer["hint"]) == ("ToolchainError", "pip install ninja")
    assert "no ninja" in answer["message"]


def test_an_index_that_cannot_be_reached(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple/"
    with untouched(project):
        done = kernel_builder(tmp_path / "cold", "build", project, "--variant", CPU, PIP_INDEX_URL=url)
        offline = kernel_builder(tmp_path / "cold", "build", project, "--variant", CPU, "--offline")
    assert_refused(
        done, 4, "FetchError", where=f"at {url}", says="the index cannot be reached", hint="kernel-builder toolchain"
    )
    assert_refused(offline, 4, "FetchError", where="Torch 2.10", says="not in the store", hint="toolchain fetch")
    assert list((tmp_path / "cold" / "toolchains").glob("trees/*torch*")) == []


def test_a_download_that_is_not_what_is_pinned(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    wheel = lock.shipped().torch[Release(2, 10)].platforms[this_platform()]["stable"]
    with IndexServer({wheel.file: b"short"}, {wheel.file: Fault()}, stated={wheel.file: wheel.sha256}) as server:
        arguments = ("build", project, "--variant", CPU, "--index-url", server.url)
        with untouched(project):
            truncated = kernel_builder(tmp_path / "cold", *arguments)
            server.stated.clear()
            altered = kernel_builder(tmp_path / "cold", *arguments)
    assert_refused(truncated, 4, "FetchError", where=wheel.file, says="truncated", hint="another index")
    assert_refused(altered, 4, "FetchError", where=wheel.file, says=f"expected {wheel.sha256}", hint="mirrors")


def test_no_permission_to_write_the_cache(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with untouched(project):
        done = kernel_builder(tmp_path / "file" / "cache", "build", project, "--variant", CPU)
    assert_refused(done, 4, "StoreError", where="file", says="cannot be written", hint="KERNEL_BUILDER_CACHE")


def test_a_cache_in_a_place_that_compilers_cannot_take(project: Path, kernel_builder: Run, new_cache: NewCache) -> None:
    cache = new_cache("my cache, mine")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 4, "StoreError", where=str(cache), says="white space", hint="KERNEL_BUILDER_CACHE")


@pytest.mark.parametrize("name", ["""it's "$HOME": a `name`; & {more}, 100%""", "new\nline", "gr\udcf6sser"])
def test_odd_names_of_project_directories(
    copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path, name: str
) -> None:
    odd, plain = copy_project("stable-scale", name), copy_project("stable-scale", "plain")
    for directory in (odd, plain):
        done = kernel_builder(cache, "build", directory, "--variant", CPU, "--no-load")
        assert done.code == 0, done
    assert done.answer["steps"] == 0
    assert snapshot(odd / "build") == snapshot(plain / "build")


def test_odd_names_of_sources(project: Path, cache: Path, kernel_builder: Run) -> None:
    """g++ accepts any name; nvcc does not, and it passes names to a shell."""
    for old, new in (("scale_cpu.cpp", "a b'$:,é;.cpp"), ("scale_cuda.cu", "it's a scale.cu")):
        replace(project / "build.toml", old, new)
        (project / "scale" / old).rename(project / "scale" / new)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--variant", CUDA, "--no-load")
    assert done.code == 0, done
    replace(project / "build.toml", "it's a scale.cu", "$(touch owned).cu")
    (project / "scale" / "it's a scale.cu").rename(project / "scale" / "$(touch owned).cu")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CUDA)
    assert_refused(
        done, 2, "ConfigError", where="[kernel.scale_cuda] src", says="nvcc cannot compile", hint="rename the file"
    )


def test_a_compile_error(project: Path, cache: Path, kernel_builder: Run) -> None:
    """The error has file, variant, command and the compiler's words."""
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "factor * in[i]", "factor * input[i]")
    arguments = ("build", project, "--variant", CPU)
    with untouched(project):
        done = kernel_builder(cache, *arguments, "--compiler-cache", "off")
        people = subprocess.run(
            [BUILDER, *arguments], capture_output=True, text=True, env=environment(cache), check=False
        )
    assert_refused(done, 5, "BuildError", where=str(source), says=CPU, hint="")
    assert "scale/scale_cpu.cpp:4" in done.answer["output"]
    assert "‘input’ was not declared" in done.answer["output"]
    assert "g++ -c " in done.answer["command"]
    assert people.returncode == 5
    assert people.stdout == ""
    for words in (f"error: {source}", CPU, "command: ", "‘input’ was not declared"):
        assert words in people.stderr
    replace(source, "factor * input[i]", "factor * in[i]")
    mended = kernel_builder(cache, *arguments, "--no-load")
    # The source and the binding, whose namespace covers the source.
    assert (mended.code, mended.answer["compiles"]) == (0, 2)


def test_several_errors_name_one_and_finish_nothing(project: Path, cache: Path, kernel_builder: Run) -> None:
    replace(project / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * input[i]")
    replace(project / "torch-ext" / "torch_binding.cpp", "Tensor in,", "Tensir in,")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU, "--jobs", "2")
    assert_refused(done, 5, "BuildError", where=str(project), says=CPU, hint="")
    assert not (cache / "binaries").exists() or not list((cache / "binaries").rglob("*.so"))


@pytest.mark.parametrize("header", ["scale/lost.h", "cutlass/cutlass.h"])
def test_a_missing_header(project: Path, cache: Path, kernel_builder: Run, header: str) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "#include", f"#include <{header}>\n#include")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    hint = f"{header} is neither in the project nor in the headers of this variant"
    assert_refused(done, 5, "BuildError", where=str(source), says=CPU, hint=hint)


@pytest.mark.parametrize(
    ("old", "new", "where", "says", "hint"),
    [
        ("scale_cpu.cpp", "scale_cuda.cu", "[kernel.scale_cpu] src", "is a CUDA source", 'backend = "cuda"'),
        ("scale_cpu.cpp", "scale_cpu.f90", "[kernel.scale_cpu] src", "neither a header nor a source", ".cpp"),
        (
            "torch-ext/torch_binding.cpp",
            "torch-ext/torch_binding.h",
            "[kernel.scale_cpu] src",
            "nothing to compile",
            "registers the ops",
        ),
    ],
)
def test_sources_of_another_kind(
    project: Path, cache: Path, kernel_builder: Run, old: str, new: str, where: str, says: str, hint: str
) -> None:
    replace(project / "build.toml", old, new)
    (project / new if "/" in new else project / "scale" / new).touch()
    if says == "nothing to compile":
        replace(project / "build.toml", '"scale/scale_cpu.cpp", ', "")
        where = "[torch] src"
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 2, "ConfigError", where=where, says=says, hint=hint)


@pytest.mark.parametrize(
    ("declaration", "call", "code", "error", "words"),
    [
        ("float lost(float);", "lost(in[i])", 7, "CheckError", "lost"),
        pytest.param(
            'extern "C" unsigned arc4random();',
            "arc4random()",
            5,
            "BuildError",
            "arc4random (GLIBC_2.36)",
            marks=pytest.mark.skipif(GLIBC < (2, 36), reason="this machine's own C library does not have it"),
        ),
    ],
)
def test_symbols_that_are_nowhere_or_too_new(
    project: Path, cache: Path, kernel_builder: Run, declaration: str, call: str, code: int, error: str, words: str
) -> None:
    source = project / "scale" / "scale_cpu.cpp"
    replace(source, "void scale(", f"{declaration}\nvoid scale(")
    replace(source, "factor * in[i]", call)
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert done.code == code, done
    assert done.answer["error"] == error
    assert words in done.answer["message"]
    assert CPU in done.answer["message"]
    assert done.answer["hint"]


def test_what_is_built_does_not_load(project: Path, cache: Path, kernel_builder: Run) -> None:
    """A package that cannot be imported is not put in place."""
    (project / "torch-ext" / "stable_scale" / "__init__.py").write_text("from . import lost\n")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 7, "CheckError", where=str(project), says="lost", hint="is unchanged")


@pytest.mark.parametrize("out", [False, True])
def test_a_file_where_packages_should_go(project: Path, cache: Path, kernel_builder: Run, out: bool) -> None:
    shutil.rmtree(project / "build")
    place = project / ("packages" if out else "build")
    place.write_text("mine")
    with untouched(project):
        done = kernel_builder(
            cache, "build", project, "--variant", CPU, "--no-load", *(["--out", place] if out else [])
        )
    assert_refused(done, 6, "PackageError", where=str(place), says="is a file", hint="--out")
    assert done.answer["hint"]


def test_a_place_that_cannot_be_written(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with untouched(project):
        done = kernel_builder(
            cache, "build", project, "--variant", CPU, "--no-load", "--out", tmp_path / "file" / "out"
        )
    assert_refused(done, 6, "PackageError", where=str(tmp_path / "file"), says="cannot be written", hint="--out")


@pytest.mark.parametrize("dangling", [False, True])
def test_build_may_be_a_link_elsewhere(
    copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path, dangling: bool
) -> None:
    project, elsewhere = copy_project("stable-scale"), tmp_path / "elsewhere" / "packages"
    elsewhere.parent.mkdir()
    if not dangling:
        elsewhere.mkdir()
        (elsewhere / "mine.txt").write_text("mine")
    (project / "build").symlink_to(elsewhere)
    done = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load")
    assert done.code == 0, done
    assert (project / "build").readlink() == elsewhere
    assert (elsewhere / CPU / "metadata.json").is_file()
    assert [path.name for path in elsewhere.parent.iterdir()] == ["packages"]
    assert dangling or (elsewhere / "mine.txt").read_text() == "mine"


def test_two_projects_of_one_name(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    one, two = copy_project("python-only", "one"), copy_project("python-only", "two")
    with untouched(one, two):
        done = kernel_builder(cache, "build", one, two)
    assert_refused(done, 2, "ConfigError", where="[general] name", says="named python-only", hint="rename")


def test_one_bad_project_of_two_stops_both(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    good, bad = copy_project("python-only"), copy_project("stable-scale")
    replace(bad / "scale" / "scale_cpu.cpp", "factor * in[i]", "factor * input[i]")
    with untouched(good, bad):
        done = kernel_builder(cache, "build", good, bad, "--backend", "cpu")
    assert_refused(done, 5, "BuildError", where=str(bad), says=CPU, hint="")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bulid"], "No such command 'bulid'"),
        (["build", "--varient", "x"], "No such option"),
        (["build", "--jobs", "0"], "--jobs"),
        (["build", "--backend", "tpu"], "'cpu', 'cuda'"),
        (["build", "--jobs", "many", "--json"], "not a valid integer"),
    ],
)
def test_nonsense_on_the_command_line(cache: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    """click refuses wrong commands: usage on stderr, nothing on stdout, exit code 2."""
    done = subprocess.run(
        [BUILDER, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(cache)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--compiler-cache", "no-such-sccache", "no program"), ("--cuda-home", "/nonexistent", "")],
)
def test_programs_that_do_not_exist(
    project: Path, cache: Path, kernel_builder: Run, option: str, value: str, says: str
) -> None:
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CUDA, option, value)
    assert done.code == 4, done
    assert says in done.answer["message"]
    assert done.answer["hint"]


def test_nobody_reads_the_output(project: Path, cache: Path) -> None:
    """`kernel-builder build … | head -0`: no traceback, and the package is whole."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [BUILDER, "build", project, "--variant", CPU, "--no-load"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
        check=False,
        # The default, as in a shell; Python ignores the signal and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    )
    os.close(writing)
    assert "Traceback" not in done.stderr, done.stderr
    assert (project / "build" / CPU / "__init__.py").is_file()
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "scale", "torch-ext"]
