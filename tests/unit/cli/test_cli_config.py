"""The commands that read projects: of several, each is read, and each notice is printed once."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from kernel_builder.config.variant import this_platform
from tests.support.cli import expect, invoke
from tests.support.files import write_files

BUILD_TOML = Path(__file__).with_name("demo.toml").read_text()


def in_edition_6(added: str, text: str = BUILD_TOML) -> str:
    """Return the file as `update-build` converts it."""
    return text.replace('"rocm"]\n', f'"rocm"]\n{added}').replace('backend = "', 'language = "cpp-')


def project(directory: Path, text: str) -> Path:
    """Write a project without an edition into a new directory."""
    write_files(directory, ("binding.cpp", "demo.cpp", "demo.cu", "torch-ext/demo_kernel/__init__.py"))
    return write_files(directory, {"build.toml": text})


@pytest.fixture
def several(tmp_path: Path) -> list[Path]:
    """Three projects, one with a mistake, and two other paths that `*` matches."""
    project(tmp_path / "a", BUILD_TOML)
    project(tmp_path / "b", BUILD_TOML.replace("license", "licence"))
    project(tmp_path / "c", BUILD_TOML)
    (tmp_path / "README.md").touch()
    (tmp_path / "scripts").mkdir()
    return sorted(tmp_path.iterdir())


def test_check_config_of_several_ends_in_one_table(several: list[Path]) -> None:
    done = expect(2, "[general] licence: unknown key", "check-config", *several)
    assert done.stdout.splitlines() == [
        "project      version  framework  backends",
        "demo-kernel  3        torch      cpu, cuda, rocm",
        "demo-kernel  3        torch      cpu, cuda, rocm",
        "b            error",
        "2 of 3 projects accepted",
    ]
    assert "did you mean `license`?" in done.stderr
    assert done.stderr.count("no edition") == 1
    assert done.stderr.count("does not compile for rocm") == 1
    assert "skipped, without a build.toml: README.md, scripts" in done.stderr
    assert invoke("check-config", *(path for path in several if path.name != "b")).exit_code == 0
    answer = json.loads(invoke("check-config", "--json", *several).stdout)
    assert answer["ok"] is False
    good, bad, _ = answer["projects"]
    assert good["project"]["warnings"][0].startswith("build.toml has no edition")
    assert bad["error"]["hint"] == "did you mean `license`?"


def test_what_does_not_exist_is_a_mistake(several: list[Path]) -> None:
    for command in ("check-config", "list-variants", "update-build"):
        expect(2, "no-such-directory", command, several[1], several[1].parent / "no-such-directory")
        expect(2, "is a file; expected a directory", command, several[0])


@pytest.mark.parametrize(
    ("framework", "backends", "notice"),
    [
        ("torch", '["metal"]', "does not compile for metal: Metal's compiler is Apple's and runs on macOS only"),
        ("torch", '["xpu"]', "does not compile for xpu: the package index has Intel's runtime and no SYCL compiler"),
        ("torch", '["rocm"]', "does not compile for rocm: it is on the full C++ ABI, and no package index has a Torch"),
        ("tvm-ffi", '["rocm"]', "does not compile for rocm: without Torch, which brings the HIP runtime"),
    ],
)
def test_nothing_has_to_be_buildable(tmp_path: Path, framework: str, backends: str, notice: str) -> None:
    general = '[general]\nname = "demo-kernel"\nversion = 1\nedition = 5\nlicense = "mit"\n'
    home = project(tmp_path, f"{general}backends = {backends}\n[{framework}]\nsrc = ['binding.cpp']\n")
    if "tvm" in framework:
        (home / "torch-ext").rename(home / "tvm-ffi-ext")
    for command in ("check-config", "list-variants"):
        done = expect(0, "", command, home)
        assert done.stderr.startswith(f"warning: demo-kernel: this builder {notice}")
        assert done.stderr.count("\n") == 1


def test_list_variants_goes_on_and_says_each_obstacle_once(several: list[Path]) -> None:
    for path in (several[1], several[3]):  # two of which say the obstacle
        project(path, BUILD_TOML.replace("[torch]", '[torch]\nstable-abi = { cuda = "2.8" }'))
    done = expect(2, "[general] licence: unknown key", "list-variants", *several)
    lines = done.stdout.splitlines()
    assert any(line.startswith("demo-kernel/") and line.endswith(f"-cpu-{this_platform()}") for line in lines)
    assert f"demo-kernel/torch-stable-abi28-cu130-{this_platform()}  (not here)" in lines
    assert done.stderr.count("the stable ABI of Torch 2.8 has no headers") == 1
    rows = json.loads(invoke("list-variants", "--json", *several).stdout)
    assert {row["buildable"] for row in rows} == {True, False}


def test_update_build_shows_the_difference_and_writes_it(tmp_path: Path) -> None:
    home = project(tmp_path / "a", BUILD_TOML)
    file = home / "build.toml"
    real = home / "real.toml"
    file.rename(real)
    file.symlink_to(real)
    real.chmod(0o640)
    for option in ("--check", "--dry-run"):
        expect(1, "\n+edition = 6\n", "update-build", home, option)
        assert real.read_text() == BUILD_TOML
    assert expect(0, "", "update-build", home).stdout.splitlines()[-1] == "1 of 1 file converted"
    assert real.read_text() == in_edition_6("edition = 6\n")
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert file.is_symlink()
    outside = tmp_path / "outside.toml"
    (linked := project(tmp_path / "linked", BUILD_TOML) / "build.toml").rename(outside)
    linked.symlink_to(outside)
    assert "is a symbolic link out of the project" in invoke("update-build", linked.parent).stderr
    assert outside.read_text() == BUILD_TOML
    for option in ((), ("--check",)):
        assert expect(0, "", "update-build", home, *option).stdout.startswith("0 of 1 file ")
    assert invoke("check-config", home).stderr.count("warning") == 1  # rocm


def test_an_old_file_gets_a_license(tmp_path: Path) -> None:
    """check-config names the missing key, and update-build adds it."""
    old = BUILD_TOML.replace("version = 3\n", "").replace('license = "apache-2.0"\n', "")
    home = project(tmp_path / "a", old)
    assert "[general] license: is missing" in invoke("check-config", home).stderr
    assert "--license NAME" in expect(2, "[general] license: is missing", "update-build", home).stderr
    assert invoke("update-build", home, "--license", "mit").exit_code == 0
    added = 'version = 1\nedition = 6\nlicense = "mit"\n'
    assert (home / "build.toml").read_text() == in_edition_6(added, old)
    missing = project(
        tmp_path / "b", BUILD_TOML.replace('license = "apache-2.0"', "edition = 5").replace("version = 3", "")
    )
    assert "version: is missing, and `license` too" in invoke("check-config", missing).stderr


def test_check_config_judges_flags_as_a_build_does(tmp_path: Path) -> None:
    text = BUILD_TOML.replace('"cpu", "cuda", "rocm"', '"cpu"')
    home = project(tmp_path / "a", f'{text}cxx-flags = ["-I./inc/", "-O2"]\n')
    (home / "inc").mkdir()
    kernel = json.loads(invoke("check-config", home, "--json").stdout)["projects"][0]["project"]["kernels"][-1]
    assert (kernel["include"], kernel["cxx_flags"]) == (["inc"], ["-O2"])
    notice = "[kernel.demo_cuda] is for cuda, which is not in [general] backends: it is not built"
    assert notice in invoke("check-config", home).stderr
    for flag, reason in (
        ("-ObjC++", "chooses the language"),
        ("-I/opt/x", "outside of the project"),
        ("-shared", "a linker option"),
    ):
        expect(2, reason, "check-config", project(tmp_path / "b", f'{text}cxx-flags = ["{flag}"]\n'))
    several = invoke("check-config", home, tmp_path / "b")
    assert several.exit_code == 2 and "1 of 2 projects accepted" in several.stdout


def test_options_of_the_public_tool_are_accepted(tmp_path: Path) -> None:
    home = project(tmp_path / "a", BUILD_TOML.replace("version = 3", "version = 3\nedition = 5"))
    for command in ("build", "build-and-copy", "build-and-upload", "devshell", "testshell"):
        expect(2, "there is no such file", command, tmp_path / "gone", "--max-jobs", "2", "--cores", "4", "-L")
    cases = (((), "there is no repository to publish to"), (("--repo-type", "model"), "'model' is not 'kernel'"))
    for arguments, message in cases:
        done = invoke("upload", home, "--repo-type", "kernel", *arguments)
        assert done.exit_code in (2, 7) and message in done.stderr, done.output
    expect(0, "", "fill-card", home, tmp_path / "card.md")
    assert 'get_kernel("org/demo-kernel", version=3)' in (tmp_path / "card.md").read_text()
