"""The variants that a project must offer, by the rules of the Hub and the data of the matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.config import offered
from kernel_builder.config.project import Kernel, Project, TorchFramework, TorchNoarch
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, Variant
from kernel_builder.errors import VariantError

from .conftest import PROJECTS

X86_64 = "x86_64-linux"


def names(project: Project, *, whole: bool = False) -> set[str]:
    return {
        v.name.removesuffix("-x86_64-linux") for v in offered.variants(project, whole=whole) if "aarch" not in v.name
    }


@pytest.fixture(scope="module")
def stable() -> Project:
    return read_project(PROJECTS / "stable-scale")


@pytest.fixture(scope="module")
def full() -> Project:
    return read_project(PROJECTS / "full-scale")


def with_torch(project: Project, **changes: object) -> Project:
    assert isinstance(project.framework, TorchFramework)
    return replace(project, framework=replace(project.framework, **changes))  # type: ignore[arg-type]


def test_a_stable_abi_project_offers_one_variant_for_each_cuda_major(stable: Project) -> None:
    assert names(stable) == {"torch-stable-abi210-cpu", "torch-stable-abi210-cu126", "torch-stable-abi210-cu130"}


def test_a_full_abi_project_offers_the_last_two_releases(full: Project) -> None:
    published = {214: ("cpu", "cu126", "cu130", "cu132"), 215: ("cpu", "cu130", "cu132")}
    assert names(full) == {f"torch{torch}-cxx11-{b}" for torch, backends in published.items() for b in backends}


def test_the_whole_matrix_serves_old_clients_from_stable_binaries(stable: Project) -> None:
    whole = names(stable, whole=True)
    assert names(stable) < whole
    assert {f"torch{torch}-cxx11-cpu" for torch in range(210, 216)} < whole
    assert "torch212-cxx11-cu132" in whole
    assert "torch211-cxx11-cu132" not in whole


def test_python_only_projects_have_one_variant_for_each_backend() -> None:
    assert names(read_project(PROJECTS / "python-only")) == {"torch-cpu", "torch-cuda"}


def test_both_platforms_are_offered(stable: Project) -> None:
    assert {v.platform for v in offered.variants(stable)} == {"x86_64-linux", "aarch64-linux"}


def test_ranges_narrow_the_matrix(full: Project) -> None:
    assert names(with_torch(full, maxver=Release(2, 11))) >= {"torch210-cxx11-cpu", "torch211-cxx11-cu128"}
    only13 = replace(full, cuda_minver=Release(13, 0), cuda_maxver=Release(13, 0))
    assert names(only13) == {f"torch{t}-cxx11-{b}" for t in (214, 215) for b in ("cpu", "cu130")}
    needy = replace(full, kernels=tuple(replace(k, cuda_minver=Release(13, 2)) for k in full.kernels))
    assert "torch214-cxx11-cu130" not in names(needy)


def test_a_range_with_nothing_left_names_the_keys(full: Project) -> None:
    with pytest.raises(VariantError, match="no cuda variant") as caught:
        offered.variants(replace(full, cuda_minver=Release(14, 0)))
    assert "[general.cuda] minver" in str(caught.value.where)
    with pytest.raises(VariantError, match="no cpu variant"):
        offered.variants(with_torch(full, minver=Release(3, 0)))


def test_capabilities_are_intersected_and_keep_their_suffixes() -> None:
    kernel = Kernel("k", "cuda", (), (), cuda_capabilities=("12.0+PTX", "9.0a", "5.0", "10.0f"))
    assert offered.capabilities(kernel, Release(13, 0), X86_64) == ("9.0a", "10.0f", "12.0+PTX")
    assert offered.capabilities(kernel, Release(12, 6), X86_64) == ("5.0", "9.0a")


def test_a_kernel_needs_a_capability_that_the_compiler_and_the_platform_have() -> None:
    kernel = Kernel("k", "cuda", (), (), cuda_capabilities=("5.0", "8.7"))
    assert offered.capabilities(kernel, Release(13, 0), "aarch64-linux") == ("8.7",)
    with pytest.raises(VariantError, match=r"CUDA 13\.0 compiles for none of 5\.0, 8\.7"):
        offered.capabilities(kernel, Release(13, 0), X86_64)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (("9.0",), ("9.0a",)),
        (("12.0", "9.0"), ("9.0a", "12.0+PTX")),
        (("8.9",), ("8.0",)),  # code for 8.0 runs on 8.9
        (("7.5",), ("8.0",)),  # nothing at or below it: the lowest, for its symbols
    ],
)
def test_a_limit_selects_the_nearest_capabilities_with_their_suffixes(
    only: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    kernel = Kernel("k", "cuda", (), (), cuda_capabilities=("12.0+PTX", "9.0a", "8.0"), only_capabilities=only)
    assert offered.capabilities(kernel, Release(13, 0), X86_64) == expected


def test_a_limit_selects_from_all_capabilities_of_a_kernel_without_a_list() -> None:
    kernel = Kernel("k", "cuda", (), (), only_capabilities=("9.0",))
    assert offered.capabilities(kernel, Release(13, 0), X86_64) == ("9.0",)


def test_without_capabilities_a_kernel_gets_all_and_ptx_of_the_newest() -> None:
    kernel = Kernel("k", "cuda", (), ())
    every = offered.capabilities(kernel, Release(13, 0), X86_64)
    assert every[0] == "7.5"
    assert every[-1] == "12.1+PTX"
    assert sum("PTX" in capability for capability in every) == 1
    # A CUDA release that is not in the matrix takes the capabilities of the release before it.
    assert offered.capabilities(kernel, Release(13, 1), X86_64) == every
    # Jetson's capabilities are compiled for aarch64 only.
    assert set(offered.capabilities(kernel, Release(13, 0), "aarch64-linux")) - set(every) == {"8.7", "11.0"}


@pytest.mark.parametrize(
    ("project", "name", "words"),
    [
        ("stable-scale", "torch-stable-abi211-cpu-x86_64-linux", "stable ABI for cpu is 2.10"),
        ("stable-scale", "torch29-cxx11-cpu-x86_64-linux", "starts at Torch 2.10"),
        ("stable-scale", "torch-cpu", "is compiled"),
        ("full-scale", "torch-stable-abi210-cpu-x86_64-linux", "no stable ABI"),
        ("python-only", "torch213-cxx11-cpu-x86_64-linux", "Python only"),
        ("python-only", "torch-xpu", "no xpu backend"),
    ],
)
def test_a_variant_that_the_project_rules_out_is_refused(project: str, name: str, words: str) -> None:
    with pytest.raises(VariantError, match=words):
        offered.check_offered(read_project(PROJECTS / project), Variant.parse(name))


def test_variants_outside_the_matrix_can_be_requested(full: Project, stable: Project) -> None:
    offered.check_offered(full, Variant.parse("torch29-cxx11-cu129-x86_64-linux"))
    offered.check_offered(stable, Variant.parse("torch211-cxx11-cu130-x86_64-linux"))


def test_backends_that_are_not_built_are_named(tmp_path: Path) -> None:
    project = replace(read_project(PROJECTS / "stable-scale"), backends=("cpu", "rocm"))
    assert offered.skipped_backends(project) == ("rocm",)
    assert not offered.skipped_backends(replace(project, framework=TorchNoarch()))
