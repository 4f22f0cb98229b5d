"""Mistakes in a project or on the command line are refused with their place and a hint, and change nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from kernels_data import Metadata

from kernel_sandbox.confine import BUBBLEWRAP, LANDLOCK
from tests.integration.build_command.conftest import (
    BUILDER,
    Copy,
    Run,
    assert_refused,
    environment,
    replace,
    untouched,
)
from tests.support.places import CPU
from tests.support.sandboxes import hide_bubblewrap, skip_unless


@pytest.mark.parametrize(
    ("old", "new", "where", "message", "hint"),
    [
        ("license", "licence", "build.toml: [general] licence", "unknown key", "did you mean `license`?"),
        ("version = 1", 'version = "1"', "build.toml: [general] version", "expected an integer", "an integer"),
        ("scale_cpu.cpp", "scael.cpp", "build.toml: [kernel.scale_cpu] src", "no file 'scale/scael.cpp'", "relative"),
        ("scale/scale_cpu.cpp", "../scale.cpp", "[kernel.scale_cpu] src", "not a path inside", "without `..`"),
        ('["."]', '["/usr/include"]', "build.toml: [torch] include", "not a path inside", "relative to"),
        ("stable-scale", "../scale", "build.toml: [general] name", "not a name of small letters", "my-kernel"),
        ('["9.0"]', '["sm_90"]', "[kernel.scale_cuda] cuda-capabilities", "'sm_90' is not a CUDA", 'like "9.0"'),
        ('["cpu", "cuda"]', "[]", "build.toml: [general] backends", "empty", 'backends = ["cpu", "cuda"]'),
        ('"cuda"]', '"cuda", "rocm"]', "build.toml: [general] backends", "lists rocm, and no", 'backend = "rocm"'),
    ],
)
def test_a_mistake_in_build_toml_is_refused(
    project: Path, cache: Path, kernel_builder: Run, old: str, new: str, where: str, message: str, hint: str
) -> None:
    replace(project / "build.toml", old, new)
    with untouched(project):
        done = kernel_builder(cache, "build", project)
    assert_refused(done, 2, "ConfigError", where=f"{project}/", message=message, hint=hint)
    assert where in done.answer["where"]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"# K\xfcche\n", "line 1 is not UTF-8", "encoding UTF-8"),
        (b"# ten megabytes\n" * 650_000, "larger than 1 MB", "a few kB"),
        (b"[general\n", "is not TOML", "correct the line"),
        (None, "there is no such file, so this is not a kernel project", "kernel-builder init"),
    ],
)
def test_a_build_toml_that_cannot_be_read_is_refused(
    project: Path, cache: Path, kernel_builder: Run, content: bytes | None, message: str, hint: str
) -> None:
    file = project / "build.toml"
    file.unlink() if content is None else file.write_bytes(content)
    with untouched(project):
        done = kernel_builder(cache, "build", project)
    assert_refused(done, 2, "ConfigError", where=str(file), message=message, hint=hint)


def test_a_file_in_the_place_of_a_directory_is_refused(project: Path, cache: Path, kernel_builder: Run) -> None:
    file = project / "build.toml"
    done = kernel_builder(cache, "build", file)
    assert_refused(
        done, 2, "ConfigError", where=str(file), message="is a file, and a project is", hint="name the directory"
    )
    assert done.answer["where"] == str(file)


def test_a_directory_that_does_not_exist(cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    done = kernel_builder(cache, "build", tmp_path / "nothing")
    assert_refused(
        done, 2, "ConfigError", where="nothing/build.toml", message="no such file", hint="name the directory"
    )
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("link", ["scale/scale_cpu.cpp", "scale/scale.h", "scale/unlisted.h"])
def test_a_symbolic_link_out_of_the_project_is_refused(
    project: Path, cache: Path, kernel_builder: Run, tmp_path: Path, link: str
) -> None:
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
        done, 2, "ConfigError", where=str(project), message="link out of the project", hint="copy its target"
    )
    assert link in str(done.answer)


def test_a_header_included_by_its_absolute_path_is_refused(
    project: Path, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    (tmp_path / "mine.h").write_text("")
    replace(project / "scale" / "scale_cpu.cpp", "#include", f'#include "{tmp_path}/mine.h"\n#include')
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu")
    assert_refused(
        done,
        2,
        "ConfigError",
        where="scale/scale_cpu.cpp",
        message="by an absolute path",
        hint="copy it into the project",
    )


@pytest.mark.parametrize(
    ("old", "new", "where", "message", "hint"),
    [
        ("scale_cpu.cpp", "scale_cuda.cu", "[kernel.scale_cpu] src", "is a CUDA source", 'backend = "cuda"'),
        ("scale_cpu.cpp", "scale_cpu.f90", "[kernel.scale_cpu] src", "neither a header nor a source", ".cpp"),
        (
            "torch-ext/torch_binding.cpp",
            "torch-ext/torch_binding.h",
            "[kernel.scale_cpu] src",
            "nothing to compile",
            "registers the functions",
        ),
    ],
)
def test_sources_of_the_wrong_kind_are_refused(
    project: Path, cache: Path, kernel_builder: Run, old: str, new: str, where: str, message: str, hint: str
) -> None:
    replace(project / "build.toml", old, new)
    (project / new if "/" in new else project / "scale" / new).touch()
    if message == "nothing to compile":
        replace(project / "build.toml", '"scale/scale_cpu.cpp", ', "")
        where = "[torch] src"
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 2, "ConfigError", where=where, message=message, hint=hint)


@pytest.mark.parametrize(
    ("table", "backend"),
    [('[general.cuda]\nmaxver = "9.0"\n', "cuda"), ('minver = "3.0"\n', "cpu")],
)
def test_version_ranges_that_leave_no_variant_are_refused(
    project: Path, cache: Path, kernel_builder: Run, table: str, backend: str
) -> None:
    if backend == "cpu":
        replace(project / "build.toml", 'stable-abi = "2.10"', table)
    else:
        replace(project / "build.toml", "[torch]", f"{table}[torch]")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", backend)
    assert_refused(
        done, 3, "VariantError", where="minver, maxver", message=f"leave no {backend} variant", hint="widen the range"
    )


@pytest.mark.parametrize(
    ("variant", "message", "hint"),
    [
        ("torch-stable-abi210-cpo-x86_64-linux", "is not a variant's name; expected for example", "list-variants"),
        ("torch-stable-abi211-cpu-x86_64-linux", "the project's stable ABI for cpu is 2.10", CPU),
        (
            "torch-stable-abi210-cu118-x86_64-linux",
            "cannot be built here: needs CUDA 11.8; this builder has 12.8, 13.0 and 13.2",
            "--cuda-home",
        ),
        ("torch-cpu", "no Python-only variants", CPU),
        ("", "is not a variant's name", "list-variants"),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused(
    project: Path, cache: Path, kernel_builder: Run, variant: str, message: str, hint: str
) -> None:
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", variant)
    assert_refused(done, 3, "VariantError", where=variant, message=message, hint=hint)


def test_a_refused_variant_does_not_stop_the_others(
    project: Path, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    other = CPU.replace("x86_64", "aarch64")
    arguments = ["--variant", other, "--variant", CPU, "--no-load"]
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():  # all but a cross compiler
        if not program.name.startswith("aarch64-"):
            (programs / program.name).symlink_to(program)
    done = kernel_builder(cache, "build", project, *arguments, PATH=str(programs))
    message = "this machine has no compiler for aarch64-linux: aarch64-linux-gnu-g++: no such program"
    assert_refused(done, 3, "VariantError", where=other, message=message, hint="apt-get install g++-aarch64-linux-gnu")
    assert [(built["variant"], built["status"]) for built in done.answer["packages"]] == [(CPU, "built")]
    assert [(failed["project"], failed["variant"]) for failed in done.answer["failures"]] == [("stable-scale", other)]
    assert (project / "build" / CPU / "__init__.py").is_file()


def test_a_project_that_cannot_be_read_does_not_stop_the_others(
    copy_project: Copy, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    """As for `kernel-builder build repository/*`: files and other directories are named, and are not failures."""
    good, bad = copy_project("python-only", "good"), copy_project("python-only", "bad")
    replace(bad / "build.toml", "[general]", "[general")
    (tmp_path / "README.md").touch()
    (tmp_path / "scripts").mkdir()
    everything = [bad, good, tmp_path / "README.md", tmp_path / "scripts"]
    done = kernel_builder(cache, "build", *everything, "--no-load")
    assert_refused(done, 2, "ConfigError", where=str(bad), message="not TOML", hint="")
    assert {built["project"] for built in done.answer["packages"]} == {"python-only"}
    assert [(failed["project"], failed["variant"]) for failed in done.answer["failures"]] == [("bad", None)]
    elsewhere = {missing["project"]: missing["reason"] for missing in done.answer["unavailable"]}
    assert elsewhere == dict.fromkeys(("README.md", "scripts"), "not a project: there is no build.toml")
    assert kernel_builder(cache, "build", *everything[1:], "--no-load").code == 0


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", [None, BUBBLEWRAP, LANDLOCK])
def test_a_package_that_kills_its_loader_does_not_stop_other_projects(
    copy_project: Copy,
    cache: Path,
    kernel_builder: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
) -> None:
    """All packages of a command are loaded by forks of one process."""
    if kind == LANDLOCK:
        hide_bubblewrap(tmp_path, monkeypatch)
    bad, good = copy_project("python-only", "bad"), copy_project("python-only", "good")
    replace(bad / "build.toml", "python-only", "killer")
    (bad / "torch-ext/python_only").rename(bad / "torch-ext/killer")
    (bad / "torch-ext/killer/__init__.py").write_text("import os\n\nos.kill(os.getppid(), 9)\n")
    done = kernel_builder(cache, "build", bad, good, "--backend", "cpu", "--sandbox", "auto" if kind else "off")
    built = {package["project"]: package for package in done.answer["packages"]}
    skip_unless(kind, built["python-only"]["sandbox"]["load"])
    assert "load" in built["python-only"]["checks"]["passed"]
    if kind == LANDLOCK:  # the loader is the first process of a pid namespace, which a signal from inside cannot kill
        assert done.code == 0 and set(built) == {"killer", "python-only"}
        return
    assert_refused(done, 7, "CheckError", where=str(bad), message="killed by SIGKILL", hint="correct the project")
    assert set(built) == {"python-only"}


def test_a_package_that_changes_itself_when_it_is_loaded_is_refused(
    copy_project: Copy, cache: Path, kernel_builder: Run
) -> None:
    project = copy_project("python-only")
    with (project / "torch-ext" / "python_only" / "__init__.py").open("a") as stream:
        stream.write("\nfrom pathlib import Path\n\nPath(__file__).with_name('later.py').write_text('')\n")
    done = kernel_builder(cache, "build", project, "--backend", "cpu")
    assert_refused(
        done, 6, "PackageError", where=str(project), message="changed while it was checked", hint="must not write"
    )
    assert not (project / "build").exists()


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
    ("sandbox", "changes"), [("off", (*CHANGES[:4], "(here / '__init__.py').chmod(0o777)")), ("auto", CHANGES)]
)
def test_no_change_by_a_load_is_published(
    copy_project: Copy, cache: Path, kernel_builder: Run, changes: Sequence[str], sandbox: str
) -> None:
    """Not bytecode either, which Python runs instead of the source, nor a link to a directory, nor what has no end.

    One command builds a project for each change, so that Torch is imported once.
    """
    projects = [copy_project("python-only", f"changed-{number}") for number in range(len(changes))]
    for project, change in zip(projects, changes, strict=True):
        with (project / "torch-ext" / "python_only" / "__init__.py").open("a") as stream:
            stream.write(f"\nimport os\nfrom pathlib import Path\n\nhere = Path(__file__).parent\n{change}\n")
    done = kernel_builder(cache, "build", *projects, "--backend", "cpu", "--sandbox", sandbox)
    assert done.code == 6 and not done.answer["packages"], done
    assert not [change for project, change in zip(projects, changes, strict=True) if (project / "build").exists()]
    errors = {error["where"]: error for failed in done.answer["failures"] for error in failed["errors"]}
    assert len(errors) == len(changes), done
    for error in errors.values():
        assert error["error"] == "PackageError", error
        assert "changed while it was checked" in error["message"] and "must not write" in error["hint"], error


def test_a_load_publishes_no_other_package(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("python-only")
    with (project / "torch-ext" / "python_only" / "__init__.py").open("a") as stream:
        stream.write("\nimport shutil\nfrom pathlib import Path\n\nhere = Path(__file__).parent\n")
        stream.write("if not (here.parent / 'torch-xpu').exists():\n")
        stream.write("    shutil.copytree(here, here.parent / 'torch-xpu')\n")
    done = kernel_builder(cache, "build", project, "--backend", "cpu", "--sandbox", "off")
    assert done.code == 0, done
    assert [path.name for path in (project / "build").iterdir()] == ["torch-cpu"]


def test_a_project_for_other_backends_only_is_an_error(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("stable-scale")
    text = (project / "build.toml").read_text()
    text = text[: text.index("[kernel.")].replace('["cpu", "cuda"]', '["metal"]')
    kernel = '[kernel.m]\nbackend = "metal"\ndepends = ["torch"]\nsrc = ["scale/scale_cpu.cpp"]\n'
    (project / "build.toml").write_text(re.sub(r"stable-abi.*\n", "", text) + kernel)
    done = kernel_builder(cache, "build", project)
    hint = "leave the project out, or add cpu, cuda and rocm to `backends`"
    assert_refused(done, 12, "NothingToBuildError", where=str(project), message="not compile for metal", hint=hint)
    assert done.answer["packages"] == []
    assert done.answer["skipped-backends"] == {"stable-scale": ["metal"]}


def test_a_check_can_be_allowed_by_name(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("python-only")
    (init,) = (project / "torch-ext").glob("*/__init__.py")
    init.write_text(init.read_text() + "import transformers\n")
    refused = kernel_builder(cache, "build", project, "--no-load")
    assert_refused(refused, 7, "CheckError", where=str(project), message="transformers", hint="--allow python-imports")
    assert not (project / "build").exists()
    done = kernel_builder(cache, "build", project, "--allow", "python-imports")
    assert done.code == 0, done
    package = Path(done.answer["packages"][0]["path"])
    assert json.loads((package / "metadata.json").read_text())["provenance"]["allowed-checks"] == ["python-imports"]
    assert Metadata.read_from_file(package / "metadata.json").name is not None
    assert kernel_builder(cache, "check-builds", project).code == 7
    assert kernel_builder(cache, "check-builds", project, "--allow", "python-imports").code == 0


@pytest.mark.parametrize(
    ("name", "message"), [("pyhton-imports", "there is no such check"), ("digest", "cannot be allowed")]
)
def test_checks_that_cannot_be_allowed(
    copy_project: Copy, cache: Path, kernel_builder: Run, name: str, message: str
) -> None:
    done = kernel_builder(cache, "build", copy_project("python-only"), "--allow", name)
    assert_refused(done, 2, "ConfigError", where=f"--allow {name}", message=message, hint="python-imports")


def test_findings_are_said_once_and_in_few_lines(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("python-only")
    (init,) = (project / "torch-ext").glob("*/__init__.py")
    init.write_text(init.read_text() + "".join(f"import lost_{number}\n" for number in range(300)))
    done = kernel_builder(cache, "build", project, "--no-load")
    message = done.answer["message"]
    variants = len(done.answer["failures"])
    assert len(message.splitlines()) == 21
    assert message.count("imports lost_0,") == 1
    assert "`--json` lists all" in message
    assert all(len(failed["checks"]["findings"]) == 300 for failed in done.answer["failures"])
    assert variants > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bulid"], "No such command 'bulid'"),
        (["build", "--varient", "x"], "No such option"),
        (["build", "--jobs", "0"], "--jobs"),
        (["build", "--backend", "gpu"], "'cpu', 'cuda', 'rocm'"),
        (["build", "--jobs", "many", "--json"], "not a valid integer"),
    ],
)
def test_wrong_commands_and_options_are_refused(cache: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    """click refuses wrong commands: usage on stderr, nothing on stdout, exit code 2."""
    done = subprocess.run(
        [BUILDER, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(cache)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
