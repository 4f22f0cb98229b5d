"""Which projects a change touches, in real git repositories."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.config.changed import touched
from kernel_format.errors import ConfigError
from tests.support.files import write_files
from tests.support.git import commit_all, git
from tests.support.python_project import write_project

TOUCHED = toml_file.read(Path(__file__).with_name("touched.toml"))


def commit(repository: Path, name: str, text: str | None) -> str:
    """Write or delete a file, commit, and return the commit."""
    if text is None:
        (repository / name).unlink()
    else:
        write_files(repository, {name: text})
    commit_all(repository, f"change {name}")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two Python-only projects. `one` links to the directory `kit`, whose `more` links to the file `other/deep.py`."""
    root = tmp_path / "repository"
    for name in ("one", "two"):
        write_project(root / name)
    write_files(root, ("other/deep.py", "kit/kit.py"))
    (root / "kit/more.py").symlink_to("../other/deep.py")
    (root / "one/torch-ext/one/kit").symlink_to("../../../kit")
    (root / "two/build").mkdir()  # no link may lead in a circle
    (root / "two/again").symlink_to("../two")
    commit_all(root)
    return root


@pytest.mark.parametrize(("file", "expected"), TOUCHED.items())
def test_a_change_touches_the_projects_that_contain_or_link_to_the_file(
    repository: Path, file: str, expected: list[str]
) -> None:
    before = commit(repository, "flake.lock", "1")
    (repository / "ci").mkdir()
    commit(repository, file, "changed")
    shared = [repository / "flake.lock", repository / "ci"]
    projects = touched([repository / "one", repository / "two"], before, shared)
    assert [path.name for path in projects] == expected


def test_deleted_and_renamed_files_count(repository: Path) -> None:
    both = [repository / "two", repository / "one"]
    before = commit(repository, "two/old.cu", "a file that git recognises after it has moved\n" * 9)
    git(repository, "mv", "two/old.cu", "one/new.cu")
    git(repository, "commit", "--quiet", "--message", "move")
    assert touched(both, before) == both
    before = git(repository, "rev-parse", "HEAD")
    commit(repository, "kit/kit.py", None)
    assert touched(both, before) == [repository / "one"]
    before = git(repository, "rev-parse", "HEAD")
    commit(repository, "other/deep.py", None)  # the link to it dangles
    assert touched(both, before) == [repository / "one"]
    assert touched(both, "HEAD") == []


def test_errors_name_the_repository_and_what_to_do(repository: Path, tmp_path: Path) -> None:
    for unknown in ("no-such-branch", "0" * 40, "--output=/dev/null", ""):
        with pytest.raises(ConfigError, match=f"{repository}: git knows no commit"):
            touched([repository / "one"], unknown)
    commit(repository, "README.md", "changed")
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    with pytest.raises(ConfigError) as caught:
        touched([tmp_path / "shallow" / "one"], "HEAD^1")
    assert "git fetch --unshallow" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="--shared no-such-file: does not exist"):
        touched([repository / "one"], "HEAD^1", [Path("no-such-file")])
    with pytest.raises(ConfigError, match=r"\*: does not exist"):
        touched([repository / "*"], "HEAD^1")
    (tmp_path / "alone").mkdir()
    with pytest.raises(ConfigError, match="alone: git knows"):
        touched([tmp_path / "alone"], "HEAD")
