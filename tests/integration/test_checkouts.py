"""Third-party repositories: none of their code runs, a commit has its own files, and changes of links are seen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.config.changed import touched
from kernel_builder.config.project_files import read_project
from kernel_builder.hub.project_sources import published_files, with_marks
from kernel_builder.hub.verification import _checkout
from kernel_builder.steps.provenance import GitState, git_state, provenance
from kernel_format.errors import ConfigError, VerificationError
from kernel_format.files import LFS_POINTER
from tests.support.cli import expect
from tests.support.files import append, write_files, write_program
from tests.support.git import commit_all, git
from tests.support.places import PROJECTS
from tests.support.python_project import write_project

pytestmark = pytest.mark.attack


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose commit has `kernel/a.cpp`, and `kernel/run.sh`, which is executable."""
    root = tmp_path / "repository"
    write_files(root / "kernel", {"a.cpp": "int a;\n", "build.toml": ""})
    write_program(root / "kernel/run.sh", "")
    (root / "kernel/link").symlink_to("a.cpp")
    commit_all(root)
    return root


def state(repository: Path) -> GitState | None:
    return git_state(repository / "kernel", [repository / "kernel/a.cpp"])


def commit_of(repository: Path, text: str) -> str:
    """Return a commit like HEAD with another text of a.cpp, to which no branch leads."""
    blob = git(repository, "hash-object", "-w", "--stdin", text=text)
    kernel = git(repository, "mktree", text=f"100644 blob {blob}\ta.cpp")
    tree = git(repository, "mktree", text=f"040000 tree {kernel}\tkernel")
    return git(repository, "commit-tree", tree, "-m", "Other")


def test_a_replaced_commit_has_its_own_files(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert state(repository) == GitState(commit, dirty=False)
    git(repository, "replace", "HEAD", commit_of(repository, "int evil;\n"))
    (repository / "kernel/a.cpp").write_text("int evil;\n")
    assert state(repository) == GitState(commit, dirty=True)
    project = _checkout((repository, "kernel/"), commit, tmp_path / "checkout")
    assert (project / "a.cpp").read_text() == "int a;\n"


@pytest.mark.parametrize("forged", ["HEAD:kernel", "HEAD^{tree}", "HEAD:kernel/a.cpp"])
def test_objects_with_other_content_than_their_name_says_are_found(
    repository: Path, tmp_path: Path, forged: str
) -> None:
    """Git reads folders and files without a comparison, so the names of commits and files do not change."""
    commit, name = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", forged)
    other = git(repository, "rev-parse", forged.replace("HEAD", commit_of(repository, "int evil;\n")))
    place, source = (repository / ".git" / "objects" / of[:2] / of[2:] for of in (name, other))
    place.chmod(0o600)
    place.write_bytes(source.read_bytes())
    (repository / "kernel/a.cpp").write_text("int evil;\n")
    assert state(repository) == GitState(commit, dirty=True)
    with pytest.raises(VerificationError, match="cannot check out the commit"):
        _checkout((repository, "kernel/"), commit, tmp_path / "checkout")


def test_a_checkout_has_the_files_of_the_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters and conversions do not change them."""
    (repository / ".gitattributes").write_text("*.cpp eol=crlf filter=evil ident\n")
    commit_all(repository, "Attributes")
    settings = tmp_path / "settings"
    settings.write_text(f'[filter "evil"]\n  smudge = touch {tmp_path}/ran; cat\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    project = _checkout((repository, "kernel/"), git(repository, "rev-parse", "HEAD"), tmp_path / "checkout")
    assert (project / "a.cpp").read_bytes() == b"int a;\n"
    assert (project / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (project / "link").readlink() == Path("a.cpp")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(VerificationError, match="cannot check out the commit"):
        _checkout((repository, "kernel/"), "0" * 40, tmp_path / "other")
    with pytest.raises(VerificationError, match="not the name of a commit"):
        _checkout((repository, "kernel/"), "--help", tmp_path / "third")


@pytest.mark.parametrize("entry", ["..", ".GIT"])
def test_a_commit_with_names_that_lead_elsewhere_is_not_checked_out(
    repository: Path, tmp_path: Path, entry: str
) -> None:
    blob = git(repository, "rev-parse", "HEAD:kernel/a.cpp")
    link = git(repository, "hash-object", "-w", "--stdin", text=str(tmp_path))
    entries = [(b"120000 a.cpp", link), (b"100644 " + entry.encode(), blob)]
    content = b"".join(about + b"\0" + bytes.fromhex(name) for about, name in entries)
    tree = subprocess.run(
        ["git", "-C", repository, "hash-object", "-t", "tree", "--literally", "-w", "--stdin"],
        input=content,
        check=True,
        capture_output=True,
    ).stdout.decode()
    commit = git(repository, "commit-tree", tree.strip(), "-m", "Bad")
    with pytest.raises(VerificationError, match="cannot check out the commit"):
        _checkout((repository, ""), commit, tmp_path / "checkout")


def test_missing_objects_are_not_fetched_by_a_program_of_the_repository(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    git(tmp_path / "remote", "init", "--quiet")
    git(repository, "config", "core.repositoryFormatVersion", "1")
    git(repository, "config", "extensions.partialClone", "origin")
    git(repository, "config", "remote.origin.url", str(tmp_path / "remote"))
    git(repository, "config", "remote.origin.promisor", "true")
    git(repository, "config", "remote.origin.uploadpack", f"touch {tmp_path}/ran; false")
    name = git(repository, "rev-parse", "HEAD:kernel")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / ".git/objects" / name[:2] / name[2:]).unlink()
    assert state(repository) == GitState(commit, dirty=True)
    with pytest.raises(VerificationError, match="cannot check out the commit"):
        _checkout((repository, "kernel/"), commit, tmp_path / "checkout")
    with pytest.raises(ConfigError, match="no common ancestor"):
        touched([repository / "kernel"], commit_of(repository, "int other;\n"))
    assert not (tmp_path / "ran").exists()


def test_a_committed_directory_is_no_repository(repository: Path, tmp_path: Path) -> None:
    """A clone of the repository around it has its configuration, which names a program."""
    kernel = repository / "kernel"
    subprocess.run(["git", "clone", "--quiet", "--bare", repository, tmp_path / "bare"], check=True)
    for path in (tmp_path / "bare").iterdir():
        path.rename(kernel / path.name)
    for key, value in (("bare", "false"), ("worktree", str(kernel)), ("fsmonitor", f"touch {tmp_path}/ran")):
        git(tmp_path, "config", "--file", str(kernel / "config"), f"core.{key}", value)
    (kernel / "index").write_bytes((repository / ".git/index").read_bytes())
    assert "a.cpp" in published_files(kernel)
    assert state(repository) is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_CONFIG_PARAMETERS"])
def test_the_environment_names_no_other_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    other = write_files(tmp_path / "other", ["mine"])
    commit_all(other)
    (repository / ".gitignore").write_text("private\n")
    (repository / "kernel/private").write_text("")
    values = {
        "GIT_DIR": other / ".git",
        "GIT_INDEX_FILE": other / ".git/index",
        "GIT_OBJECT_DIRECTORY": other / ".git/objects",
        "GIT_CONFIG_PARAMETERS": f"'core.worktree={other}'",
    }
    monkeypatch.setenv(name, str(values[name]))
    for key in ("core.fsmonitor", "filter.spy.clean"):
        git(tmp_path, "config", "--file", str(repository / ".git/config"), key, f"touch {tmp_path}/ran; cat")
    (repository / ".git/info/attributes").write_text("* filter=spy\n")
    (repository / "kernel/a.cpp").touch()
    (repository / ".git/info/exclude").write_text("kernel/notes\n")
    (repository / "kernel/notes").write_text("")
    assert state(repository) == GitState(commit, dirty=False)
    assert set(published_files(repository / "kernel")) == {"a.cpp", "build.toml", "link", "run.sh"}
    assert touched([repository / "kernel"], commit) == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["GLOBAL", "SYSTEM", "COUNT", "PARAMETERS"])
def test_the_users_configuration_excludes_files_and_runs_no_program(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_files(tmp_path, {"excludes": "private*\n", "repository/kernel/private.md": ""})
    settings = {"core.excludesFile": f"{tmp_path}/excludes", "core.fsmonitor": f"touch {tmp_path}/ran; false"}
    for number, (key, value) in enumerate(settings.items()):
        git(tmp_path, "config", "--file", "settings", key, value)
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    lists = {"COUNT": "2", "PARAMETERS": " ".join(f"'{key}={value}'" for key, value in settings.items())}
    monkeypatch.setenv(f"GIT_CONFIG_{name}", lists.get(name, f"{tmp_path}/settings"))
    assert set(published_files(repository / "kernel")) == {"a.cpp", "build.toml", "link", "run.sh"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", ["without-git", "refused-by-git", "in-a-foreign-work-tree"])
def test_only_sources_and_texts_are_published_if_git_does_not_track_the_project(
    repository: Path, tmp_path: Path, case: str
) -> None:
    kernel = repository / "kernel"
    write_files(kernel, {".gitignore": "secret*\n/data/\n", "sub/.gitignore": "key.toml\n"})
    hidden = ("secret.txt", "secret.py", "data/x.py", "sub/key.toml", "venv/pyvenv.cfg", "venv/lib/x.py", "weights.bin")
    write_files(kernel, dict.fromkeys((*hidden, "csrc/b.cu"), "x"))
    if case == "refused-by-git":  # as the repository of another user
        (repository / ".git/HEAD").write_text("?")
    else:
        (repository / ".git").rename(tmp_path / "elsewhere")
    if case == "in-a-foreign-work-tree":  # whose rules hold too
        write_files(tmp_path, {"notes": "", ".gitignore": "repository/kernel/mine.py\n"})
        write_files(kernel, {"mine.py": "", ".git/empty": ""})
        git(tmp_path, "init", "--quiet")
        git(tmp_path, "add", "notes")
    assert set(published_files(kernel)) - {"link"} == {"a.cpp", "build.toml", "csrc/b.cu"}
    (kernel / "csrc/b.cu").write_text("// Not written yet: the kernel\n// `Not written yet` marks texts")
    assert with_marks(kernel, published_files(kernel)) == ["csrc/b.cu"]
    for content, message in (
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "is a private key"),
        (bytes(5000) + b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n", "is a private key"),
        ("-----BEGIN EC PRIVATE KEY-----".encode("utf-16"), "is a private key"),
        (b"PuTTY-User-Key-File-3: ssh-ed25519\n", "is a private key"),
        (b"0\x82\x04\xbe\x02\x01\x000\r\x06\t*", "is a private key"),
        (LFS_POINTER + b"v1\n", "is a pointer of git-lfs"),
        (bytes(11 << 20), "sources have at most"),
    ):
        (kernel / "notes.md").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            published_files(kernel)
    (kernel / "notes.md").write_bytes(bytes((10 << 20) - 9) + b"-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ConfigError, match="is a private key"):
        published_files(kernel, largest=20 << 20)
    for name, message in (("a\nb.md", "be shown"), ("NOTES.md", "where case does not"), ("e\u0301.md", "form NFC")):
        (kernel / name).touch()
        with pytest.raises(ConfigError, match=message):
            published_files(kernel)
        (kernel / name).unlink()
    (kernel / "notes.md").unlink()
    git(kernel, "init", "--quiet")  # without a commit
    assert "run.sh" in published_files(kernel)
    (kernel / ".git/info/exclude").write_text("*\n")
    assert not published_files(kernel)


@pytest.mark.parametrize("without_git", [False, True])
def test_rules_have_their_meaning_in_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_git: bool) -> None:
    """A file of an excluded directory stays excluded."""
    ignored = [
        "first.py",
        "private/notes.md",
        "private/deep/notes.md",
        "open/a.md",
        *["token_1.md"] * (not without_git),
    ]
    write_files(tmp_path, dict.fromkeys((*ignored, "kept.md"), ""))
    (tmp_path / ".gitignore").write_text("/*\n!*.md\n!/private\nprivate/\ntoken_[[:digit:]].md\n", "utf-8-sig")
    if without_git:
        monkeypatch.setenv("PATH", "/nowhere")
    assert set(published_files(tmp_path)) == {"kept.md"}


@pytest.mark.parametrize("in_git", [True, False])
def test_ignored_files_are_in_no_package(tmp_path: Path, in_git: bool) -> None:
    """Nor are the targets of links, which a pull request may add."""
    project = write_project(tmp_path / "twice")
    write_files(project, {".gitignore": "secret*", "secret.py": "", ".env": "", "torch-ext/twice/secret.pem": ""})
    for name, target in (("direct.py", "secret.py"), ("hidden.py", ".env")):
        (project / "torch-ext/twice" / name).symlink_to(project / target)
        (project / name).symlink_to(target)
    write_files(tmp_path, {".env": ""})
    (project / "beside.md").symlink_to("../.env")
    if in_git:
        commit_all(project)
        git(tmp_path, "init", "--quiet")
    append(project / "build.toml", 'pyext = ["py", "pem"]\n')
    assert [name for name, _ in read_project(project).python_files] == ["__init__.py"]
    assert set(published_files(project)) == {"build.toml", "torch-ext/twice/__init__.py"}


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("target", [".env", "private/notes.md", None])
def test_an_ignored_file_is_no_card(tmp_path: Path, target: str | None, in_git: bool) -> None:
    project = write_project(tmp_path / "twice")
    rules = "private\n" if target else "CARD.md\n"
    write_files(project, {".gitignore": rules, ".env": "", "private/notes.md": ""})
    if target:
        (project / "CARD.md").symlink_to(target)
    else:
        (project / "CARD.md").touch()
    if in_git:
        commit_all(project)
    expect(ConfigError.exit_code, "CARD.md: git excludes the card", "fill-card", project)


def test_a_link_leads_only_to_what_its_repository_tracks(tmp_path: Path) -> None:
    project = write_project(tmp_path / "twice")
    (project / "notes.md").symlink_to("../notes.md")
    (project / "torch-ext/twice/settings.py").symlink_to("../../../notes.md")
    commit_all(tmp_path)
    write_files(tmp_path, {"notes.md": ""})
    assert "notes.md" not in published_files(project)
    with pytest.raises(ConfigError, match="does not track"):
        read_project(project)
    commit_all(tmp_path, "Second")
    assert "notes.md" in published_files(project)
    assert "settings.py" in dict(read_project(project).python_files)


def test_files_of_a_repository_in_an_ignored_directory_are_in_no_package(tmp_path: Path) -> None:
    """Though that repository tracks them. Those of a submodule are the project's."""
    project = write_project(tmp_path / "twice")
    package = project / "torch-ext/twice"
    for name in ("private", "torch-ext/twice/private"):
        write_files(project / name, {"token.py": ""})
        commit_all(project / name)
    (package / "linked.py").symlink_to("../../private/token.py")
    (project / "notes.md").symlink_to("private/token.py")
    write_files(project, {".gitignore": "private/"})
    commit_all(project)
    assert [name for name, _ in read_project(project).python_files] == ["__init__.py"]
    assert "notes.md" not in published_files(project)
    write_files(tmp_path / "library", {"shared.py": ""})
    commit_all(tmp_path / "library")
    git(project, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "library"), "third")
    (package / "linked.py").unlink()
    (package / "linked.py").symlink_to("../../third/shared.py")
    commit_all(project, "Second")
    assert [name for name, _ in read_project(project).python_files] == ["__init__.py", "linked.py"]


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [("-----BEGIN PRIVATE KEY-----", 2, "key.json: is a private key"), (None, 6, "key.json is gone")],
)
def test_no_private_key_and_no_removed_file_is_published_from_a_package(
    tmp_path: Path, text: str | None, status: int, message: str
) -> None:
    project = write_project(tmp_path / "twice")
    append(project / "build.toml", 'pyext = ["py", "json"]\n')
    write_files(project, {"torch-ext/twice/key.json": text or ""})
    expect(0, "", "build", project, "--no-load")
    if text is None:
        (project / "torch-ext/twice/key.json").unlink()
    expect(status, message, "wheel", project, "--no-load")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A repository whose kernel has its device code by a link to a link."""
    project = tmp_path / "kernels" / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", project, ignore=shutil.ignore_patterns("build"))
    (project / "scale").rename(tmp_path / "shared")
    (tmp_path / "kernels" / "scale").symlink_to("../shared")
    (project / "scale").symlink_to("../scale")
    commit_all(tmp_path)
    return tmp_path


def test_changes_are_seen_through_links(linked: Path) -> None:
    """Also that of a link, though the files that it leads to are those of a commit."""
    project = linked / "kernels" / "stable-scale"

    def recorded(*files: str) -> Any:
        return provenance(read_project(project), ["scale/scale_cpu.cpp", *files])["kernel"]

    shutil.copytree(linked / "shared", linked / "other")
    commit_all(linked, "Second")
    (linked / "unrelated").touch()
    committed = {"commit": git(linked, "rev-parse", "HEAD"), "dirty": False}
    assert recorded() == committed
    for name in ("shared/scale_cpu.cpp", "kernels/stable-scale/torch-ext/stable_scale/__init__.py"):
        append(linked / name, "\n")
        assert recorded()["dirty"], name
        git(linked, "checkout", "--", ".")
    for name in ("kernels/scale", "kernels/stable-scale/scale"):
        (linked / name).unlink()
        (linked / name).symlink_to(linked / "other")
        assert recorded()["dirty"], name
        git(linked, "checkout", "--", ".")
    assert recorded() == committed
    (project / "scale" / "rates.h").write_text("#define RATE 2\n")
    assert recorded("scale/rates.h")["dirty"], "a header that no commit has"


def test_files_of_a_submodule_are_compared_with_its_commit(linked: Path, tmp_path_factory: Any) -> None:
    library = tmp_path_factory.mktemp("library")
    (library / "rates.h").write_text("#define RATE 2\n")
    commit_all(library)
    project = linked / "kernels" / "stable-scale"
    git(linked, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "third")
    (project / "third").symlink_to("../../third")
    commit_all(linked, "Second")

    def is_dirty() -> Any:
        return provenance(read_project(project), ["third/rates.h"])["kernel"]["dirty"]

    assert not is_dirty()
    (linked / "third" / "rates.h").write_text("#define RATE 3\n")
    assert is_dirty()
