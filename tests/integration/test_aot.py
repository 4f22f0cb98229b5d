"""Triton kernels become binary packages: by the real Triton and compilers, without a GPU."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_builder.aot import generation
from kernel_builder.backends.rocm import NOT_RUN, ROCM
from tests.support.cli import invoke
from tests.support.files import append, replace, write_files
from tests.support.places import CUDA, SOURCES
from tests.support.triton_store import require_triton
from tests.unit.aot.test_declaration import AOT, KERNELS, project

NOARCH = "torch-cuda"


@pytest.fixture(scope="module", autouse=True)
def _triton() -> None:
    require_triton()


def build(directory: Path, *options: str, capability: str = "9.0") -> dict[str, Any]:
    command = ["build", str(directory), "--capability", capability, "--variant", CUDA, "--no-load", "--json", *options]
    result = invoke(*command)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = project(tmp_path_factory.mktemp("aot")).root
    answer = build(root, "--variant", NOARCH)
    assert {package["variant"] for package in answer["packages"]} == {CUDA, NOARCH}, answer
    return root


def test_the_binary_package_has_no_triton(built: Path) -> None:
    package = built / "build" / CUDA
    assert "import triton" not in (package / "kernels.py").read_text()
    assert "import triton" in (built / "build" / NOARCH / "kernels.py").read_text()
    (library,) = package.glob("*.so")
    assert b"libcuda.so" not in library.read_bytes()
    assert json.loads((package / "metadata.json").read_text())["backend"]["archs"] == ["9.0"]


def test_the_wheel_for_a_platform_has_the_python_kernels_too(tmp_path: Path) -> None:
    root = project(tmp_path / "p", f'capabilities = ["9.0"]\n{AOT}').root
    invoke("build", str(root), "--variant", CUDA, "--variant", NOARCH, "--no-load")
    written = json.loads(invoke("wheel", str(root), "--no-load", "--json").stdout)["wheels"]
    assert [wheel["variants"] for wheel in written] == [[NOARCH], [CUDA, NOARCH]]


def test_two_builds_give_the_same_bytes(
    built: Path, tmp_path: Path, new_cache: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another directory, with another cache."""
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(new_cache("cache")))
    copy = Path(shutil.copytree(built, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("build")))
    assert build(copy)["packages"]
    files = {path.name: path.read_bytes() for path in (built / "build" / CUDA).iterdir() if path.is_file()}
    assert {path.name: path.read_bytes() for path in (copy / "build" / CUDA).iterdir() if path.is_file()} == files


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (lambda text: text.replace("* factor,", "* factr,"), r"kernels\.py:\d+$", "factr"),
        (
            lambda text: text.replace("    tl.store", '    tl.device_print("x", at)\n    tl.store'),
            r"kernels\.py:8$",
            "device_print",
        ),
        (lambda text: "import torch.cuda\nraise ValueError('at import')\n" + text, "kernels.py", "at import"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_an_error(
    tmp_path: Path, change: Callable[[str], str], where: str, message: str
) -> None:
    answer = build(project(tmp_path / "p", kernels=change(KERNELS)).root)
    (failure,) = answer["failures"]
    (error,) = failure["errors"]
    assert re.search(message, error["message"])
    assert re.search(where, error["where"])
    assert not (tmp_path / "p/build").exists()


def test_a_capability_with_too_little_shared_memory_is_named(tmp_path: Path) -> None:
    """The kernel's pipeline has 112 KiB, which 8.0 and 9.0 have, and 8.6 has not."""
    kernels = re.sub(r"    at = .*\n    tl.store.*\n", SOURCES["loop_of_products"], KERNELS)
    aot = AOT.replace(', "float32"', "").replace('divisible = ["x_ptr", "n"]', 'types = { x_ptr = "*T:16" }')
    aot = re.sub("config = .*", "config = [{ FLAG = false, num_stages = 8 }]", aot)
    (failure,) = build(project(tmp_path / "p", aot, kernels).root, capability="8.6")["failures"]
    (error,) = failure["errors"]
    assert "for capability 8.6 needs 114688 bytes of shared memory, and a block has 101376" in error["message"]
    assert "leave 8.6 out of `capabilities` in aot.toml" in error["hint"]


@pytest.mark.nightly
def test_the_same_source_is_compiled_for_every_architecture_of_rocm(tmp_path: Path) -> None:
    """It uses a function of libdevice, which Triton has for CUDA and ROCm."""
    aot = 'capabilities = ["9.0"]\n' + re.sub("divisible = .*", "", AOT.replace(', "float32"', ""))
    kernels = "from triton.language.extra import libdevice\n" + KERNELS.replace("* factor,", "* libdevice.erf(factor),")
    root = project(tmp_path / "p", aot, kernels).root
    replace(root / "build.toml", '["cuda"]', '["cuda", "rocm"]')
    append(root / "build.toml", f"rocm_archs = {json.dumps(ROCM.known_archs())}\n")
    variant = "torch-stable-abi210-rocm72-x86_64-linux"
    command = ["build", str(root), "--variant", variant, "--variant", CUDA, "--no-load", "--json", "--keep-generated"]
    answer = json.loads(invoke(*command, str(tmp_path / "shown")).stdout)
    assert {package["variant"] for package in answer["packages"]} == {variant, CUDA}, answer
    package = root / "build" / variant
    metadata = json.loads((package / "metadata.json").read_text())
    assert metadata["backend"]["archs"] == ROCM.known_archs()
    assert metadata["provenance"]["status"] == NOT_RUN
    (library,) = package.glob("*.so")
    targets = re.findall(rb"amdgcn-amd-amdhsa--(gfx\w+)", library.read_bytes())
    assert {target.decode() for target in targets} == set(ROCM.known_archs())
    table = (tmp_path / "shown/scale-rocm/aot/scale_cubins.cpp").read_text()
    images = re.findall(r'{(\d+), false, image_\d+, "scale_kernel", (\d+), ', table)
    of_each = {(int(number) >= 0x1000, int(threads)) for number, threads in images}
    assert of_each == {(False, 128), (False, 256), (True, 64), (True, 128)}  # 2 and 4 warps of 64 threads, and of 32
    assert "import triton" not in (package / "kernels.py").read_text()


_WRITE = "pathlib.Path.write_text = lambda path, text: open(path, 'w')"
_ANSWER = {"name": "f", "threads": 1, "shared": 1, "scratch": 1}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            "pathlib.Path.write_bytes = lambda path, data: os.symlink('/etc/hostname', path)",
            "is not a file of the sandbox",
        ),
        ("pathlib.Path.write_bytes = lambda path, data: open(path, 'wb').truncate(1 << 30)", "has more than 64 MB"),
        (f"{_WRITE}.write('[' * 100_000)", "is not an answer of the"),
        (f"{_WRITE}.write(json.dumps({_ANSWER} | {{'name': 'f() {{}}'}}))", "is not the name of"),
        (f"{_WRITE}.write(json.dumps({_ANSWER} | {{'threads': '1'}}))", "no answer of Triton"),
        ("while True: pass", "did not end within"),
    ],
)
def test_files_that_a_module_replaces_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str, message: str
) -> None:
    """The module with the kernels runs in the sandbox at its import, and can write there in place of the compiler."""
    if message == "did not end within":
        monkeypatch.setattr(generation, "_SECONDS", 2)
        monkeypatch.setattr(generation, "_SECONDS_EACH", 0)
    aot = 'capabilities = ["9.0"]\n' + re.sub("divisible = .*", "", AOT.replace(', "float32"', ""))
    answer = build(project(tmp_path / "p", aot, f"import json, os, pathlib\n{attack}\n{KERNELS}").root)
    (failure,) = answer["failures"]
    assert message in failure["errors"][0]["message"]


def test_the_generated_project_is_shown(built: Path, tmp_path: Path) -> None:
    build(built, "--keep-generated", str(tmp_path / "shown"))
    shown = tmp_path / "shown/scale"
    assert {path.name for path in (shown / "aot").iterdir()} >= {"scale.cpp", "launch.h", "binding.cpp"}
    assert len((shown / "aot/scale.cpp").read_text().splitlines()) <= 200
    assert AOT.splitlines()[0] not in (shown / "build.toml").read_text()
    assert invoke("check-config", shown).exit_code == 0


@pytest.mark.attack
def test_a_directory_of_another_name_is_in_the_package(built: Path, tmp_path: Path) -> None:
    """The cache has the generated project of the same files in another directory."""
    root = Path(shutil.copytree(built, tmp_path / "moved", ignore=shutil.ignore_patterns("build")))
    for place in ("before", "after"):
        write_files(root / "torch-ext/scale", [f"{place}/util.py"])
        build(root)
        assert (root / "build" / CUDA / place / "util.py").is_file()
        shutil.rmtree(root / "torch-ext/scale" / place)
