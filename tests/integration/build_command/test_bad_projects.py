"""Mistakes in a project or on the command line are refused with their place and a hint, and change nothing."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
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

Edit = Callable[[Path], object]


def in_file(name: str, old: str, new: str) -> Edit:
    return lambda project: replace(project / name, old, new)


def in_build_toml(old: str, new: str) -> Edit:
    return in_file("build.toml", old, new)


def with_other_source(name: str) -> Edit:
    def edit(project: Path) -> None:
        replace(project / "build.toml", "scale_cpu.cpp", name)
        (project / "scale" / name).touch()

    return edit


def without_sources(project: Path) -> None:
    replace(project / "build.toml", '"scale/scale_cpu.cpp", ', "")
    replace(project / "build.toml", "torch_binding.cpp", "torch_binding.h")
    (project / "torch-ext/torch_binding.h").touch()


@pytest.mark.parametrize(
    ("edit", "where", "message", "hint"),
    [
        (in_build_toml("license", "licence"), "[general] licence", "unknown key", "did you mean `license`?"),
        (in_build_toml("[general]", "[general"), "build.toml", "is not TOML", "correct the line"),
        (lambda project: (project / "build.toml").unlink(), "build.toml", "there is no such file", "init"),
        (in_build_toml('"cuda"]', '"cuda", "rocm"]'), "[general] backends", "lists rocm", 'language = "cpp-rocm"'),
        (
            lambda project: (project / "torch-ext/stable_scale").rename(project / "torch-ext/scale"),
            "torch-ext/stable_scale/__init__.py",
            "is missing",
            "with the name of the kernel",
        ),
        (
            in_file("scale/scale_cpu.cpp", "#include", '#include "/tmp/mine.h"\n#include'),
            "scale/scale_cpu.cpp",
            "by an absolute path",
            "copy it into the project",
        ),
        (with_other_source("scale_cuda.cu"), "scale_cpu] src", "is a CUDA source", 'language = "cpp-cuda"'),
        (with_other_source("scale_cpu.f90"), "scale_cpu] src", "neither a header nor a source", ".cpp"),
        (without_sources, "[torch] src", "nothing to compile", "registers the functions"),
    ],
)
def test_a_mistake_in_a_project_is_refused_before_compiling(
    project: Path, cache: Path, kernel_builder: Run, edit: Edit, where: str, message: str, hint: str
) -> None:
    edit(project)
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 2, "ConfigError", where=where, message=message, hint=hint)
    assert str(project) in done.answer["where"]


@pytest.mark.parametrize(("name", "message"), [("file", "is a file, and a project is"), ("nothing", "no such file")])
def test_a_directory_that_is_none_is_refused(
    cache: Path, kernel_builder: Run, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "file").touch()
    done = kernel_builder(cache, "build", tmp_path / name)
    assert_refused(done, 2, "ConfigError", where=name, message=message, hint="name the directory")
    assert not (tmp_path / "nothing").exists()


def test_version_ranges_that_leave_no_variant_are_refused(project: Path, cache: Path, kernel_builder: Run) -> None:
    replace(project / "build.toml", "[torch]", '[general.cuda]\nmaxver = "9.0"\n[torch]')
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cuda")
    assert_refused(
        done, 3, "VariantError", where="minver, maxver", message="leave no cuda variant", hint="widen the range"
    )


@pytest.mark.parametrize(
    ("variant", "message", "hint"),
    [
        ("torch-stable-abi210-cpo-x86_64-linux", "is not a variant's name; expected for example", "list-variants"),
        (
            "torch-stable-abi210-cu118-x86_64-linux",
            "cannot be built here: needs CUDA 11.8; this builder has 12.8, 13.0, 13.2 and 13.4",
            "--cuda-home",
        ),
        ("torch-cpu", "no Python-only variants", CPU),
    ],
)
def test_a_variant_that_cannot_be_built_is_refused(
    project: Path, cache: Path, kernel_builder: Run, variant: str, message: str, hint: str
) -> None:
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", variant)
    assert_refused(done, 3, "VariantError", where=variant, message=message, hint=hint)


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
    """Not bytecode either, which Python runs instead of the source, nor a link to a directory, nor an endless file.

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


def test_a_project_for_other_backends_only_is_an_error(copy_project: Copy, cache: Path, kernel_builder: Run) -> None:
    project = copy_project("stable-scale")
    text = (project / "build.toml").read_text()
    text = text[: text.index("[kernel.")].replace('["cpu", "cuda"]', '["metal"]')
    kernel = '[kernel.m]\nlanguage = "cpp-metal"\ndepends = ["torch"]\nsrc = ["scale/scale_cpu.cpp"]\n'
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
    ("arguments", "message"),
    [
        (["build", "--varient", "x"], "No such option"),
        (["build", "--backend", "gpu"], "'cpu', 'cuda'"),
        (["build", "--jobs", "many", "--json"], "not a valid integer"),
    ],
)
def test_wrong_commands_and_options_are_refused(
    cache: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """click refuses wrong commands: usage on stderr, nothing on stdout, exit code 2."""
    done = subprocess.run(
        [BUILDER, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(cache)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
