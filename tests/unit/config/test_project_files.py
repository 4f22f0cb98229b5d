"""The files that a build.toml names: symbolic links, the Python package, reserved names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.hub import card, project_sources
from kernel_format.errors import ConfigError
from tests.support.sample_project import MINIMAL, mistake, write_project


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return write_project(tmp_path)


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
def test_a_symbolic_link_out_of_the_project_is_refused(home: Path, tmp_path: Path, link: str, where: str) -> None:
    outside = tmp_path / "outside"
    (home / link).rename(outside)
    (home / link).symlink_to(outside)
    error = mistake(home, MINIMAL.replace("[torch]", '[torch]\ninclude = ["inc"]'))
    assert error.where == f"{home}/{where}"
    assert "is a symbolic link out of the project" in error.message


def test_no_link_publishes_what_git_keeps_or_is_outside(home: Path, tmp_path: Path) -> None:
    """A checkout's `.git/config` may hold a token, and would be in the package, on `main` and in the card."""
    (home / "build.toml").write_text(MINIMAL)
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
                with pytest.raises(ConfigError, match="is a symbolic link out of the project"):
                    card.source_text(project)
            elif place == link:
                assert "is a symbolic link out of the project" in mistake(home, MINIMAL).message
            place.unlink()


@pytest.mark.parametrize("link", ["relu.cpp", "inc", "torch-ext/my_relu/layers", "torch-ext/my_relu"])
def test_links_into_the_git_repository_of_the_project_are_followed(home: Path, tmp_path: Path, link: str) -> None:
    text = MINIMAL.replace("[torch]", '[torch]\ninclude = ["inc"]')
    (home / "build.toml").write_text(text)
    expected = read_project(home)
    outside = tmp_path / "shared"
    (home / link).rename(outside)
    (home / link).symlink_to(outside)
    mistake(home)
    (tmp_path / ".git").mkdir()
    assert read_project(home) == expected
    (home / ".git").mkdir()  # a repository in the repository
    mistake(home)
    (home / ".git").rmdir()
    (home / link).unlink()
    outside.rename(tmp_path / ".git/shared")
    (home / link).symlink_to(tmp_path / ".git/shared")
    mistake(home)


@pytest.mark.parametrize("name", ["_ops.py", "metadata.json", "my_relu/ops.py"])
def test_names_that_the_builder_uses_are_reserved(home: Path, name: str) -> None:
    file = home / "torch-ext/my_relu" / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    error = mistake(home, MINIMAL.replace("[torch]", '[torch]\npyext = ["py", "json", "pyc"]'))
    assert error.where == str(home / "torch-ext/my_relu" / name.partition("/")[0])


def test_a_module_may_have_the_name_of_the_package(home: Path) -> None:
    (home / "torch-ext/my_relu/my_relu.py").touch()
    assert "my_relu.py" in dict(read_project(home).python_files)


def test_hints_for_files_that_are_not_there(home: Path, tmp_path: Path) -> None:
    """The link that `cp -r` leaves, and an empty submodule."""
    (home / "kit").symlink_to("../kit-that-was-not-copied")
    (home / ".gitmodules").write_text('[submodule "x"]\n\tpath = third_party/x\n')
    text = MINIMAL
    for old, new, hint in (
        ("relu.cpp", "kit/relu.cpp", "kit is a symbolic link that leads nowhere, as after `cp -r`"),
        ("relu.cpp", "third_party/x/a.cpp", "git submodule update --init third_party/x"),
    ):
        assert old in text
        (home / "build.toml").write_text(text.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            read_project(home)
        assert caught.value.hint is not None and hint in caught.value.hint
