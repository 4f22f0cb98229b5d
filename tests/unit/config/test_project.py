"""Reading a project: every value, the files that it names, and each mistake with its place and a hint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.config.project import TorchFramework
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release
from kernel_builder.hub import card, project_sources
from kernel_format.errors import ConfigError
from tests.support.cli import invoke
from tests.support.files import write_files
from tests.support.git import git

MINIMAL = Path(__file__).with_name("minimal.toml").read_text()
MISTAKES = toml_file.read(Path(__file__).with_name("mistakes.toml"))["mistake"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project with all files that the tests' texts name, at a path with a space and an umlaut."""
    names = ["relu.cpp", "relu.cu", "inc/relu.h", "torch-ext/binding.cpp"]
    python = ["__init__.py", "layers/__init__.py", "data/table.json", "notes.txt", "__pycache__/stale.py", ".hidden.py"]
    names += [f"torch-ext/my_relu/{name}" for name in (*python, "__pycache__/__init__.cpython-311.pyc")]
    return write_files(tmp_path / "my ünusual project", dict.fromkeys(names, "") | {"build.toml": MINIMAL})


def mistake(home: Path, text: str | None = None) -> ConfigError:
    """Return the error with which a project is refused, after its build.toml has got a text, if one is given."""
    if text is not None:
        (home / "build.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_project(home)
    error = caught.value
    assert error.hint and error.where
    assert error.where.startswith(str(home))
    return error


def test_values_that_no_other_test_reads(home: Path) -> None:
    """Builds, wheels and the comparisons with the public parser and with Nix have the other keys."""
    hub = '[general.hub]\nrepo-id = "o/my-relu"\nbranch = "v3"\n\n'
    torch = '[torch]\ninclude = ["./inc", "."]\npyext = ["py", "json"]\nmaxver = "2.15"'
    text = MINIMAL.replace("[torch]", hub + torch).replace('["cpu"]', '["cpu"]\nsource = "git@github.com:o/src.git"')
    (home / "build.toml").write_text(text)
    read, package = read_project(home), home / "torch-ext/my_relu"
    assert (read.root, read.name, read.python_name, read.version) == (home, "my-relu", "my_relu", 1)
    assert (read.source, read.hub_repo_id, read.hub_branch) == ("git@github.com:o/src.git", "o/my-relu", "v3")
    assert read.framework == TorchFramework(
        src=("torch-ext/binding.cpp",), include=("inc", "."), pyext=("py", "json"), maxver=Release(2, 15)
    )
    names = ("__init__.py", "data/table.json", "layers/__init__.py")
    assert read.python_files == tuple((name, package / name) for name in names)


@pytest.mark.parametrize("entry", MISTAKES, ids=lambda entry: entry["message"] or entry["hint"])
def test_a_mistake_is_reported(home: Path, entry: Mapping[str, str]) -> None:
    assert entry["old"] in MINIMAL
    (home / "kit").symlink_to("../kit-that-was-not-copied")
    (home / ".gitmodules").write_text('[submodule "x"]\n\tpath = lib/x\n')
    error = mistake(home, MINIMAL.replace(entry["old"], entry["new"], 1))
    assert error.where == f"{home / 'build.toml'}: {entry['where']}".removesuffix(": ")
    assert entry["message"] in error.message
    assert entry["hint"] in str(error.hint)
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
    assert rest == ["[kernel.cuda] cuda-capabilities: no known CUDA compiles for 11.8; it is skipped"]
    limits = '[torch]\ncxx-flags = ["-mtune=generic", "-march=x86-64"]'
    flags = MINIMAL.replace("[torch]", limits).replace("depends =", 'cxx-flags = ["-mavx512f"]\ndepends =', 1)
    (home / "build.toml").write_text(flags)
    (notice,) = read_project(home).warnings
    assert "[kernel.relu] cxx-flags: on a processor without the instructions of -mavx512f" in notice
    (home / "build.toml").write_text(MINIMAL)
    assert read_project(home).warnings == ()


@pytest.mark.parametrize(
    ("link", "where"),
    [
        ("relu.cpp", "build.toml: [kernel.relu] src"),
        ("torch-ext/binding.cpp", "build.toml: [torch] src"),
        ("inc", "build.toml: [torch] include"),
        ("torch-ext/my_relu/layers/__init__.py", "torch-ext/my_relu/layers/__init__.py"),
        ("torch-ext/my_relu/layers", "torch-ext/my_relu/layers"),
        ("torch-ext/my_relu", "torch-ext/my_relu"),
    ],
)
def test_links_are_followed_into_the_git_repository_of_the_project_only(
    home: Path, tmp_path: Path, link: str, where: str
) -> None:
    text = MINIMAL.replace("[torch]", '[torch]\ninclude = ["inc"]')
    (home / "build.toml").write_text(text)
    expected = read_project(home)
    outside = tmp_path / "shared"
    (home / link).rename(outside)
    (home / link).symlink_to(outside)
    error = mistake(home)
    assert error.where == f"{home}/{where}"
    assert "is a symbolic link out of the project" in error.message
    git(tmp_path, "init", "--quiet")
    mistake(home)  # in a foreign repository, such as a home directory in git
    git(tmp_path, "add", str(home))
    mistake(home)  # a link publishes no untracked file
    git(tmp_path, "add", str(outside))
    assert read_project(home) == expected
    (home / ".git").mkdir()  # a repository in the repository
    mistake(home)
    (home / ".git").rmdir()
    (home / link).unlink()
    outside.rename(tmp_path / ".git/shared")
    (home / link).symlink_to(tmp_path / ".git/shared")
    mistake(home)


def test_a_source_that_git_excludes_is_named_before_publication(home: Path) -> None:
    project = read_project(home)
    project_sources.check_complete(project, project_sources.published_files(home))
    git(home, "init", "--quiet")
    (home / ".gitignore").write_text("relu.cpp\n")
    with pytest.raises(ConfigError, match=r"lists relu\.cpp, which would not be published"):
        project_sources.check_complete(project, project_sources.published_files(home))


def test_no_link_publishes_what_git_keeps_or_is_outside(home: Path, tmp_path: Path) -> None:
    """A checkout's `.git/config` may hold a token, and would be in the package, on `main` and in the card."""
    project = read_project(home)
    (home / ".git").mkdir()
    secrets = [home / ".git" / "config", tmp_path / "outside"]
    for secret in secrets:
        secret.write_text("token")
        link = home / "torch-ext" / "my_relu" / "linked.py"
        for place in (link, home / "CARD.md"):
            place.symlink_to(secret)
            assert place.relative_to(home).as_posix() not in project_sources.published_files(home)
            if place == home / "CARD.md":
                with pytest.raises(ConfigError, match="does not track the target"):
                    card.source_text(project)
            elif place == link:
                assert "is a symbolic link out of the project" in mistake(home, MINIMAL).message
            place.unlink()


@pytest.mark.parametrize("name", ["_ops.py", "metadata.json", "my_relu/ops.py"])
def test_names_that_the_builder_uses_are_reserved(home: Path, name: str) -> None:
    write_files(home / "torch-ext/my_relu", [name])
    error = mistake(home, MINIMAL.replace("[torch]", '[torch]\npyext = ["py", "json", "pyc"]'))
    assert error.where == str(home / "torch-ext/my_relu" / name.partition("/")[0])


@pytest.mark.attack
@pytest.mark.parametrize(
    ("command", "link"), [("build", "build"), ("wheel", "dist"), ("sign", "build"), ("sign", "build/torch-cpu")]
)
def test_no_command_writes_through_a_link_of_the_project(home: Path, tmp_path: Path, command: str, link: str) -> None:
    (tmp_path / "other").mkdir()
    (home / link).parent.mkdir(exist_ok=True)
    (home / link).symlink_to(tmp_path / "other")
    done = invoke(command, home)
    assert (done.exit_code, done.stderr.count("is a symbolic link")) == (ConfigError.exit_code, 1), done.output
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.attack
def test_links_between_directories_are_not_followed_without_end(home: Path) -> None:
    for name, other in ("ab", "ba"):
        (home / "torch-ext/my_relu" / name).mkdir()
        for number in range(2):
            (home / f"torch-ext/my_relu/{name}/{number}").symlink_to(f"../{other}")
    assert "remove links between directories" in str(mistake(home).hint)
