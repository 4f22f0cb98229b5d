"""Evaluation without a build: variants, toolchains, outputs, and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from kernel_builder.config import build_toml, offered
from kernel_builder.config.variant import PLATFORMS
from tests.support.files import replace
from tests.support.newest import BEFORE, CUDA_13, NEWEST, cuda_backends, full_abi
from tests.support.places import CPU, CUDA, LIBRARIES, PROJECTS, ROOT, SOURCES
from tests.system.nix.conftest import Nix

KernelFlake = Callable[..., Path]

GENERAL = '[general]\nname = "relu"\nversion = 1\nedition = 6\nlicense = "MIT"\n'
SOURCE = 'src = ["torch-ext/torch_binding.cpp"]\n'
BUILD_TOMLS = [
    f"{GENERAL}backends = {backends}\n{cuda}[{framework}]\n{keys}\n{kernel}"
    for backends in ('["cuda"]', '["cpu", "cuda"]', '["rocm", "cuda", "cpu"]')
    for cuda in ("", '[general.cuda]\nminver = "12.8"\n', '[general.cuda]\nmaxver = "13.0"\nminver = "12.8"\n')
    for framework, keys in (
        ("torch", SOURCE),
        ("torch", f'{SOURCE}minver = "2.11"\nmaxver = "2.13"'),
        ("torch", f'{SOURCE}maxver = "2.10"'),
        ("torch", f'{SOURCE}stable-abi = "2.10"'),
        ("torch", f'{SOURCE}stable-abi = {{ cuda = "2.11" }}'),
        ("torch", f'{SOURCE}stable-abi = "2.13"\nminver = "2.11"'),
        ("torch-noarch", ""),
    )
    for kernel in (
        "",
        '[kernel.a]\nlanguage = "cpp-cuda"\ndepends = []\nsrc = ["a.cu"]\ncuda-minver = "13.0"\n',
        '[kernel.a]\nlanguage = "cpp-cuda"\ndepends = []\nsrc = ["a.cu"]\ncuda-minver = "13.1"\n',
        '[kernel.a]\nlanguage = "cpp-cuda"\ndepends = []\nsrc = ["a.cu"]\ncuda-minver = "13.1"\n'
        '[kernel.b]\nlanguage = "cpp-cuda"\ndepends = []\nsrc = ["b.cu"]\n',
    )
    if not (framework == "torch-noarch" and kernel)
]
BUILD_TOMLS += [
    text.replace("edition = 6", "edition = 5").replace('language = "cpp-', 'backend = "') for text in BUILD_TOMLS
]


def names_by_python(text: str, system: str) -> list[str]:
    """Return the names of the variants on one system, but the compiled ones of ROCm, which the flake has not."""
    variants = offered.variants(build_toml.from_document(tomli.loads(text), "build.toml", Path("/")))
    of_system = (variant for variant in variants if variant.platform in {None, system})
    return sorted(variant.name for variant in of_system if variant.backend.name != "rocm" or variant.platform is None)


@pytest.mark.parametrize("system", PLATFORMS)
def test_nix_and_python_offer_the_same_variants(nix: Nix, tmp_path: Path, system: str) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(BUILD_TOMLS))
    got = nix.eval(SOURCES["names_of_nix"].format(ROOT=ROOT, system=system, texts=texts))
    assert got == [names_by_python(text, system) for text in BUILD_TOMLS]


def test_an_unknown_variant_is_refused_with_the_list(nix: Nix, flake: Path) -> None:
    named = 'kernel: (kernel.variant "torch99-cxx11-cu130").name'
    done = nix.run(flake, "eval", ".#rmsnorm", "--apply", named, ok=False)
    for words in ("rmsnorm has no variant torch99-cxx11-cu130", CPU, CUDA):
        assert words in done.stderr


@pytest.mark.parametrize("system", PLATFORMS)
def test_all_outputs_evaluate(nix: Nix, flake: Path, system: str) -> None:
    packages = nix.run(flake, "eval", "--raw", f".#packages.{system}.default.drvPath").stdout
    assert packages.endswith("-kernels.drv")
    cpu, cuda = (name.replace("x86_64-linux", system) for name in (CPU, CUDA))
    for outputs, needed in {
        "packages": {f"rmsnorm-{cpu}", "rope3d", "blocks", "kernel-builder", "build-and-upload"},
        "devShells": {cuda, "default", "rmsnorm", f"rmsnorm-{cuda}"},
        "checks": {"rmsnorm", "rmsnorm-cpu-tests"},
    }.items():
        apply = "builtins.mapAttrs (_: value: value.drvPath)"
        done = nix.run(flake, "eval", "--json", f".#{outputs}.{system}", "--apply", apply)
        assert needed <= json.loads(done.stdout).keys()


def test_a_kernel_has_the_outputs_of_the_public_builder(nix: Nix, kernel_flake: Callable[[Path], Path]) -> None:
    project = kernel_flake(PROJECTS / "full-scale")
    nix.run(project, "flake", "check", "--no-build")
    cpu, cuda = (full_abi(NEWEST, backend) for backend in ("cpu", CUDA_13))
    variants = json.loads(nix.run(project, "eval", "--json", ".#variants").stdout)
    assert {cpu, cuda, full_abi(BEFORE, "cpu"), full_abi(NEWEST, cuda_backends(NEWEST)[-1])} < set(variants)
    assert json.loads(nix.run(project, "eval", "--json", ".#archVariants").stdout) == variants
    same = {
        "default": "bundle",
        "backendCi.cpu": f"redistributable.{cpu}",
        "backendCi.cuda": f"redistributable.{cuda}",
        "ci-test": f"ciTests.{cuda}",
        "devShells.x86_64-linux.default": f"devShells.x86_64-linux.devShells.{cuda}",
        "devShells.x86_64-linux.test": f"devShells.x86_64-linux.testShells.{cuda}",
    }

    def derivation(attribute: str) -> str:
        return nix.run(project, "eval", "--raw", f".#{attribute}.drvPath").stdout

    assert [derivation(name) for name in same] == [derivation(target) for target in same.values()]
    others = ("bundle", "ci", "backendBundle.cpu", "backendBundle.cuda", "kernels", "build-and-copy")
    assert len({derivation(name) for name in others}) == len(others)


def test_shells_get_the_python_packages_of_the_projects_tests(nix: Nix, kernel_flake: Callable[[Path], Path]) -> None:
    flake = kernel_flake(PROJECTS / "python-only") / "flake.nix"
    changed = "pythonCheckInputs = packages: [ packages.einops ]; path = ./.;"
    replace(flake, "path = ./.;", changed)
    for shell in ("default", "test"):
        done = nix.run(flake.parent, "eval", f".#devShells.x86_64-linux.{shell}.drvPath", ok=False)
        assert "'einops' missing" in done.stderr  # in the stand-in for nixpkgs


def test_variants_get_the_header_libraries_that_they_need(nix: Nix, tmp_path: Path, kernel_flake: KernelFlake) -> None:
    source = tmp_path / "original" / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", source)
    replace(source / "build.toml", '"cpp-cuda"\ndepends = []', '"cpp-cuda"\ndepends = ["torch", "cutlass_3_8"]')
    project = kernel_flake(source)
    assert {"cutlass_3_8", "cuda-libraries-13.0"} <= nix.needs(project, f"redistributable.{CUDA}")
    by_clang = nix.needs(project, f"redistributable.{CUDA.replace('cu130', 'cu126')}")
    assert {"cutlass_3_8", "clang-22", "cuda-12.8", "cuda-libraries-12.8"} <= by_clang
    assert not {"cutlass_3_8", "cuda-libraries-13.0"} & nix.needs(project, f"redistributable.{CPU}")

    replace(project / "build.toml", "cutlass_3_8", "cutlass_4_5")
    done = nix.run(project, "build", f".#redistributable.{CUDA}", "--dry-run", "--no-link", ok=False)
    assert "no package index has cutlass_4_5" in done.stderr


def test_pinned_wheels_satisfy_the_builders_dependencies(nix: Nix) -> None:
    needed = json.loads((ROOT / "nix/python.json").read_text())["needed"]["builder"]
    projects = [ROOT / name / "pyproject.toml" for name in (".", *LIBRARIES)]
    listed = [text for file in projects for text in tomli.loads(file.read_text())["project"]["dependencies"]]
    declared = [text for text in listed if not text.startswith("torch-kernel-")]  # those are in the flake
    for python, systems in needed.items():
        for files in systems.values():
            versions = {name: version for name, version, *_ in map(parse_wheel_filename, files)}
            for requirement in map(Requirement, declared):
                if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                    assert versions[canonicalize_name(requirement.name)] in requirement.specifier
