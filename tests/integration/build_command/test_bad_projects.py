"""Mistakes in a project, a command or a toolchain are refused with their place and a hint, and change nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kernels_data import Metadata

from kernel_builder.config.variant import Release
from kernel_builder.steps.confinement import chosen
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import (
    CheckError,
    ConfigError,
    FetchError,
    NothingToBuildError,
    PackageError,
    StoreError,
    ToolchainError,
    VariantError,
)
from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK, landlock_version
from tests.integration.build_command.conftest import FOR_CPU, Copy, NewCache, Refusal, Run, assert_refused
from tests.support.files import append, replace, write_files
from tests.support.places import CPU
from tests.support.python_project import write_project
from tests.support.sandboxes import hide_bubblewrap, skip_unless

pytestmark = pytest.mark.attack

Edit = Callable[[Path], object]
PACKAGE = "torch-ext/stable_scale"
LATER, TVM_FFI = CPU.replace("210", "211"), "tvm-ffi01-cpu-x86_64-linux"


def in_file(name: str, old: str, new: str) -> Edit:
    return lambda project: replace(project / name, old, new)


def with_source(old: str, new: str) -> Edit:
    def edit(project: Path) -> None:
        replace(project / "build.toml", old, new)
        (project / "scale" / old).rename(project / "scale" / new)

    return edit


def with_headers_in_a_shell_command(project: Path) -> None:
    (project / "`touch owned`").mkdir()
    replace(project / "build.toml", 'language = "cpp-cuda"', 'language = "cpp-cuda"\ninclude = ["`touch owned`"]')


def without_sources(project: Path) -> None:
    replace(project / "build.toml", '"scale/scale_cpu.cpp", ', "")
    replace(project / "build.toml", "torch_binding.cpp", "torch_binding.h")
    (project / "torch-ext/torch_binding.h").touch()


def unchanged(project: Path) -> None:
    pass


# Backend, edit of the project, place, message, hint.
MISTAKES = [
    (
        *("cpu", in_file("scale/scale_cpu.cpp", "#include", '#include "/tmp/mine.h"\n#include')),
        *("scale/scale_cpu.cpp", "by an absolute path", "copy it into the project"),
    ),
    ("cpu", with_source("scale_cpu.cpp", "s.cu"), "scale_cpu] src", "is a CUDA source", 'language = "cpp-cuda"'),
    ("cpu", with_source("scale_cpu.cpp", "s.f90"), "scale_cpu] src", "neither a header nor a source", ".cpp"),
    ("cpu", without_sources, "[torch] src", "nothing to compile", "registers the functions"),
    ("cpu", lambda project: os.mkfifo(project / PACKAGE / "x.py"), "x.py", "is not a file: a pipe", ""),
    *(
        ("cpu", lambda project, names=names: write_files(project / PACKAGE, names), PACKAGE, message, "rename it")
        for names, message in (
            *(([name], "cannot be shown") for name in ("n\udcff.py", "a\r.py", "a\x1b[2J.py", "a\n/b.py")),
            (["a\nb.py"], r"'a\nb.py' has characters that cannot be shown"),
            (["A.py", "a.py"], "where case does not count"),
            (["\u00e9.py", "e\u0301.py"], "Unicode's form NFC"),
            (["nul.py"], "on Windows"),
        )
    ),
    # nvcc passes names to a shell.
    ("cuda", with_source("scale_cuda.cu", "$(touch owned).cu"), "cuda] src", "nvcc cannot compile", "rename the"),
    ("cuda", with_headers_in_a_shell_command, "scale_cuda] include", "nvcc cannot compile", "rename"),
]


@pytest.mark.parametrize(("backend", "edit", "where", "message", "hint"), MISTAKES)
def test_a_mistake_in_a_project_is_refused_before_compiling(
    project: Path, kernel_builder: Run, backend: str, edit: Edit, where: str, message: str, hint: str
) -> None:
    edit(project)
    done = kernel_builder.refuse(project, "--backend", backend, expected=(ConfigError, where, message, hint))
    assert str(project) in done.answer["where"]


@pytest.mark.parametrize(
    ("edit", "options", "expected"),
    [
        (
            *(in_file("build.toml", "[torch]", '[general.cuda]\nmaxver = "9.0"\n[torch]'), ("--backend", "cuda")),
            (VariantError, "minver, maxver", "leave no cuda variant", "widen the range"),
        ),
        (
            *(in_file("build.toml", '["cpu", "cuda"]', '["neuron", "xpu"]'), ("--backend", "neuron")),
            (VariantError, "[general] backends", "here for neuron; this builder does not compile for neuron", "widen"),
        ),
        (
            *(unchanged, ("--variant", "torch-stable-abi210-cpo-x86_64-linux")),
            (VariantError, "abi210-cpo", "is not a variant's name; expected for example", "list-variants"),
        ),
        (
            *(unchanged, ("--variant", "torch-stable-abi210-cu126-x86_64-linux", "--cuda-compiler", "nvcc")),
            (VariantError, "cu126", "cannot be built here: needs CUDA 12.6; this builder has 13.0", "--cuda-home"),
        ),
        *(
            (unchanged, ("--variant", name), (VariantError, name, "is not a variant of the [torch]", CPU))
            for name in ("torch-cpu", LATER, TVM_FFI)
        ),
        (unchanged, (*FOR_CPU, "--out", __file__), (PackageError, __file__, "is a file", "--out")),
        (unchanged, (*FOR_CPU, "--out", "/dev/null/out"), (PackageError, "/dev/null", "cannot be written", "--out")),
    ],
)
def test_a_variant_or_a_destination_that_is_none_is_refused(
    project: Path, shared_cache: Path, kernel_builder: Run, edit: Edit, options: Sequence[str], expected: Refusal
) -> None:
    edit(project)
    kernel_builder.refuse(project, *options, cache=shared_cache, expected=expected)


def test_a_project_that_cannot_be_read_does_not_stop_the_others(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path
) -> None:
    """As for `kernel-builder build repository/*`: files and other directories are named, and are not failures."""
    good, bad = copy_project("python-only", "good"), copy_project("python-only", "bad")
    replace(bad / "build.toml", "[general]", "[general")
    (tmp_path / "README.md").touch()
    (tmp_path / "scripts").mkdir()
    everything = [good, tmp_path / "README.md", tmp_path / "scripts", "--no-load"]
    done = kernel_builder.refuse(bad, *everything, expected=(ConfigError, bad, "not TOML", ""))
    assert {built["project"] for built in done.answer["packages"]} == {"python-only"}
    assert [(failed["project"], failed["variant"]) for failed in done.answer["failures"]] == [("bad", None)]
    elsewhere = {missing["project"]: missing["reason"] for missing in done.answer["unavailable"]}
    assert elsewhere == dict.fromkeys(("README.md", "scripts"), "not a project: there is no build.toml")
    kernel_builder.build(*everything)


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", [None, BUBBLEWRAP, LANDLOCK])
def test_a_package_that_kills_its_loader_does_not_stop_other_projects(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    """All packages of a command are loaded by forks of one process."""
    if kind == LANDLOCK:
        hide_bubblewrap(tmp_path, monkeypatch)
    bad = write_project(tmp_path / "killer", "import os\n\nos.kill(os.getppid(), 9)\n")
    good = copy_project("python-only", "good")
    options = ("--backend", "cpu", "--sandbox", "auto" if kind else "off")
    done = kernel_builder(kernel_builder.cache, "build", bad, good, *options)
    built = {package["project"]: package for package in done.answer["packages"]}
    skip_unless(kind, built["python-only"]["sandbox"])
    assert "load" in built["python-only"]["checks"]["passed"]
    if kind == LANDLOCK:  # the loader is the first process of a pid namespace, which a signal from inside cannot kill
        assert done.code == 0 and set(built) == {"killer", "python-only"}
        return
    assert_refused(done, (CheckError, bad, "killed by SIGKILL", "correct the project"))
    assert set(built) == {"python-only"}


CHANGES = [
    "(here / '__pycache__').mkdir(); (here / '__pycache__' / f'{__name__}.cpython-311.pyc').write_bytes(b'')",
    "(here / 'data').symlink_to('/etc')",
    "(here / 'data').symlink_to('/dev/zero')",
    "(here / 'empty').mkdir()",
    "os.chdir(here); [(os.mkdir('d'), os.chdir('d')) for _ in range(2000)]",
    "os.truncate((here / 'large').open('w').fileno(), 7 << 30)",
    "[(here / str(number)).touch() for number in range(20000)]",
]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("kind", "changes"),
    [(None, (*CHANGES[:4], "(here / '__init__.py').chmod(0o777)")), (BUBBLEWRAP, CHANGES), (LANDLOCK, CHANGES)],
)
def test_no_change_by_a_load_is_published(
    copy_project: Copy,
    kernel_builder: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    changes: Sequence[str],
) -> None:
    """Not bytecode either, which Python runs instead of the source, nor a link to a directory, nor an endless file.

    One command builds a project for each change, so that Torch is imported once.
    """
    if kind == LANDLOCK:
        skip_unless(kind, kind if landlock_version() > 0 else None)
        hide_bubblewrap(tmp_path, monkeypatch)
    projects = [copy_project("python-only", f"changed-{number}") for number in range(len(changes))]
    for project, change in zip(projects, changes, strict=True):
        code = f"\nimport os\nfrom pathlib import Path\n\nhere = Path(__file__).parent\n{change}\n"
        append(project / "torch-ext/python_only/__init__.py", code)
    options = ("--backend", "cpu", "--sandbox", "auto" if kind else "off")
    done = kernel_builder(kernel_builder.cache, "build", *projects, *options)
    assert done.code == 6 and not done.answer["packages"], done
    assert not [change for project, change in zip(projects, changes, strict=True) if (project / "build").exists()]
    errors = {error["where"]: error for failed in done.answer["failures"] for error in failed["errors"]}
    assert len(errors) == len(changes), done
    for error in errors.values():
        assert error["error"] == "PackageError", error
        assert "changed while it was checked" in error["message"] and "must not write" in error["hint"], error


@pytest.mark.sandbox
def test_every_command_loads_packages_in_the_sandbox(copy_project: Copy, kernel_builder: Run, tmp_path: Path) -> None:
    skip_unless(BUBBLEWRAP, chosen("auto", None).kind)
    project, owned = copy_project("python-only"), tmp_path / "owned"
    append(project / "torch-ext/python_only/__init__.py", f"\nopen({str(owned)!r}, 'w')\n")
    kernel_builder.build(project, "--variant", "torch-cpu", "--no-load")
    for command in (["check-builds", project], ["audit", "--load", project], ["wheel", project]):
        done = kernel_builder(kernel_builder.cache, *command)
        assert "No such file" in str(done.answer) + done.stderr and not owned.exists(), done


def test_packages_get_no_secrets_where_there_is_no_sandbox(
    copy_project: Copy, kernel_builder: Run, tmp_path: Path
) -> None:
    project, seen = copy_project("python-only"), tmp_path / "seen"
    code = f"\nimport os\nopen({str(seen)!r}, 'w').write(os.environ.get('HF_TOKEN', 'none'))\n"
    append(project / "torch-ext/python_only/__init__.py", code)
    kernel_builder.build(project, "--variant", "torch-cpu", "--no-load")
    done = kernel_builder(kernel_builder.cache, "check-builds", project, HF_TOKEN="secret", KERNEL_BUILDER_DEBUG="keep")
    assert "packages run without one" in done.stderr, done
    assert seen.read_text() == "none"


def test_a_project_for_other_backends_only_is_an_error(copy_project: Copy, kernel_builder: Run) -> None:
    project = copy_project("stable-scale")
    text = (project / "build.toml").read_text()
    text = text[: text.index("[kernel.")].replace('["cpu", "cuda"]', '["metal"]')
    kernel = '[kernel.m]\nlanguage = "cpp-metal"\ndepends = ["torch"]\nsrc = ["scale/scale_cpu.cpp"]\n'
    (project / "build.toml").write_text(re.sub(r"stable-abi.*\n", "", text) + kernel)
    hint = "leave the project out, or add cpu, cuda and rocm to `backends`"
    done = kernel_builder.refuse(project, expected=(NothingToBuildError, project, "not compile for metal", hint))
    assert done.answer["packages"] == []
    assert done.answer["skipped-backends"] == {"stable-scale": ["metal"]}


def test_a_check_can_be_allowed_by_name(copy_project: Copy, kernel_builder: Run) -> None:
    project = copy_project("python-only")
    append(project / "torch-ext/python_only/__init__.py", "import pytest\n")
    kernel_builder.refuse(project, "--no-load", expected=(CheckError, project, "pytest", "--allow python-imports"))
    assert not (project / "build").exists()
    options = ("--allow", "python-imports")
    answer = kernel_builder.build(project, "--variant", "torch-cpu", "--no-load", *options)
    package = Path(answer["packages"][0]["path"])
    assert json.loads((package / "metadata.json").read_text())["provenance"]["allowed-checks"] == ["python-imports"]
    assert Metadata.read_from_file(package / "metadata.json").name is not None
    assert kernel_builder(kernel_builder.cache, "check-builds", project, *options).code == 0


def test_no_compiler(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    missing = (ToolchainError, "g++", "g++ 11 or newer", "apt-get install g++")
    kernel_builder.refuse(project, *FOR_CPU, expected=missing, PATH=str(tmp_path / "bin"), CXX="")
    named = (ToolchainError, "no-such-g++", "no such program", "CXX")
    kernel_builder.refuse(project, *FOR_CPU, expected=named, CXX="no-such-g++")


def test_an_index_that_cannot_be_reached(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple/"
    cold = tmp_path / "cold"
    expected = (FetchError, f"at {url}", "the index cannot be reached", "kernel-builder toolchain")
    kernel_builder.refuse(project, *FOR_CPU, cache=cold, expected=expected, PIP_INDEX_URL=url)
    expected = (FetchError, "Torch 2.10", "not in the store", "toolchain fetch")
    kernel_builder.refuse(project, *FOR_CPU, "--offline", cache=cold, expected=expected)
    assert list((cold / "toolchains").glob("trees/*torch*")) == []


def test_a_header_that_was_changed_after_its_download(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    """The keys of steps name the download: objects of other headers would stay in the cache."""
    downloaded = Toolchains().torch(Release(2, 10), "stable").root
    cache = tmp_path / "changed"
    tree = cache / "toolchains" / "trees" / downloaded.parent.name
    shutil.copytree(downloaded.parent, tree)
    header = next(tree.rglob("macros.h"))
    os.utime(header)
    assert Toolchains(cache=cache).torch(Release(2, 10), "stable").root == tree / "tree"
    header.chmod(0o644)
    header.write_bytes(header.read_bytes()[:-1] + b" ")
    kernel_builder.refuse(
        project, *FOR_CPU, cache=cache, expected=(StoreError, header, "has SHA-256", "toolchain clean")
    )


def test_a_cache_path_that_nvcc_would_split_is_refused(project: Path, kernel_builder: Run, new_cache: NewCache) -> None:
    for name in ("my cache", "one,two", "$HOME"):
        cache = new_cache(name)
        expected = (StoreError, cache, "white space, commas", "KERNEL_BUILDER_CACHE")
        kernel_builder.refuse(project, *FOR_CPU, cache=cache, expected=expected)


def test_debugging_and_a_required_sandbox_exclude_each_other(project: Path, kernel_builder: Run) -> None:
    expected = (ToolchainError, "--sandbox", "runs nothing in a sandbox", "remove one")
    options = (*FOR_CPU, "--sandbox", "require")
    kernel_builder.refuse(project, *options, expected=expected, KERNEL_BUILDER_DEBUG="keep")
