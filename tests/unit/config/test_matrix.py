"""The variants that a project must offer, by the rules of the Hub and the data of the matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.backends.cpu import CPU
from kernel_builder.backends.cuda import CUDA
from kernel_builder.backends.cuda.releases import capabilities
from kernel_builder.backends.rocm import ROCM
from kernel_builder.config import kernel_sources, matrix, offered
from kernel_builder.config.project import Kernel, Project, TorchFramework
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, Variant
from kernel_format.errors import VariantError
from tests.support.newest import BEFORE, NEWEST, cuda_backends, full_abi
from tests.support.places import PROJECTS

X86_64 = "x86_64-linux"


def names(project: Project, *, whole: bool = False) -> set[str]:
    return {
        v.name.removesuffix("-x86_64-linux") for v in offered.variants(project, whole=whole) if "aarch" not in v.name
    }


def short(release: Release, backend: str) -> str:
    return full_abi(release, backend).removesuffix("-x86_64-linux")


@pytest.fixture(scope="module")
def stable() -> Project:
    return read_project(PROJECTS / "stable-scale")


@pytest.fixture(scope="module")
def full() -> Project:
    return read_project(PROJECTS / "full-scale")


def with_torch(project: Project, **changes: object) -> Project:
    assert isinstance(project.framework, TorchFramework)
    return replace(project, framework=replace(project.framework, **changes))  # type: ignore[arg-type]


def test_binaries_for_several_torch_releases_are_one_variant_for_each_cuda_major(stable: Project) -> None:
    assert names(stable) == {"torch-stable-abi210-cpu", "torch-stable-abi210-cu126", "torch-stable-abi210-cu130"}
    assert names(read_project(PROJECTS / "python-only")) == {"torch-cpu", "torch-cuda"}
    without_torch = read_project(PROJECTS / "tvm-scale")
    assert names(without_torch) == {"tvm-ffi01-cpu", "tvm-ffi01-cu126", "tvm-ffi01-cu130"}
    assert names(without_torch) < names(without_torch, whole=True)


def test_minver_below_the_stable_abi_asks_for_the_earlier_releases(stable: Project) -> None:
    later = with_torch(stable, stable_abi=dict.fromkeys((CPU, CUDA), Release(2, 13)))
    of_stable_abi = {"torch-stable-abi213-cpu", "torch-stable-abi213-cu126", "torch-stable-abi213-cu130"}
    assert names(later) == of_stable_abi
    mixed = with_torch(later, minver=Release(2, 12))
    assert names(mixed) == of_stable_abi | {short(Release(2, 12), b) for b in ("cpu", *cuda_backends(Release(2, 12)))}
    # ROCm has no headers of the full C++ ABI.
    rocm = with_torch(replace(mixed, backends=(ROCM,)), stable_abi={ROCM: Release(2, 13)})
    assert {name.rpartition("-")[0] for name in names(rocm)} == {"torch-stable-abi213"}
    earlier = Variant.parse("torch211-cxx11-cpu-x86_64-linux")
    for project in (later, mixed):
        with pytest.raises(VariantError, match="is not a variant of the"):
            offered.check_offered(project, earlier)


def test_a_full_abi_project_offers_the_last_two_releases(full: Project) -> None:
    assert names(full) == {
        short(release, backend) for release in (BEFORE, NEWEST) for backend in ("cpu", *cuda_backends(release))
    }


def test_the_whole_matrix_serves_old_clients_from_stable_binaries(stable: Project) -> None:
    whole = names(stable, whole=True)
    assert names(stable) < whole
    assert {short(release, "cpu") for release in matrix.load().torch} < whole
    assert "torch212-cxx11-cu132" in whole
    assert "torch211-cxx11-cu132" not in whole


def test_a_range_with_nothing_left_does_not_refuse_the_other_backends(full: Project) -> None:
    without = replace(full, backend_settings={CUDA: {"minver": Release(14, 0)}})
    assert names(without) == {short(BEFORE, "cpu"), short(NEWEST, "cpu")}
    assert list(offered.empty_backends(without)) == [CUDA]
    assert (
        "leave no cuda variant that the Hub asks for: the matrix has Torch 2.10"
        in offered.empty_backends(without)[CUDA]
    )
    assert offered.empty_backends(full) == {}
    empty = with_torch(full, minver=Release(3, 0))
    assert names(empty) == set()
    assert set(offered.empty_backends(empty)) == {CPU, CUDA}


def test_a_kernel_for_newer_cuda_releases_does_not_take_the_others_with_it(full: Project) -> None:
    (cuda,) = (kernel for kernel in full.kernels if kernel.backend is CUDA)
    newer = replace(full, kernels=(*full.kernels, replace(cuda, name="newer", cuda_minver=Release(13, 2))))
    assert names(newer) == names(full)
    of = kernel_sources.of_backend
    assert [kernel.name for kernel in of(newer, CUDA, Release(13, 0))] == [cuda.name]
    assert [kernel.name for kernel in of(newer, CUDA, Release(13, 2))] == [cuda.name, "newer"]


def test_a_source_of_several_kernels_is_compiled_once_with_the_flags_of_all() -> None:
    hopper = Kernel("one", CUDA, ("torch",), ("both.cu", "a.cu", "a.cu", "a.h"), ("x",), cuda_capabilities=("9.0a",))
    blackwell = Kernel("two", CUDA, ("cutlass_4_0",), ("b.cu", "both.cu"), ("x", "y"), cuda_capabilities=("10.0f",))
    hopper = replace(hopper, cuda_flags=("-Xcompiler", "-g", "-std=c++17", "-lineinfo"))
    blackwell = replace(blackwell, cuda_flags=("-Xcompiler", "-O3", "-std=c++17"))
    first, second, both = kernel_sources.disjoint([hopper, blackwell])
    assert first == replace(hopper, src=("a.cu", "a.h"))
    assert second == replace(blackwell, src=("b.cu",))
    assert both.src == ("both.cu", "a.h")
    assert both.depends == ("torch", "cutlass_4_0")
    assert both.include == ("x", "y")
    assert both.cuda_flags == ("-Xcompiler", "-g", "-std=c++17", "-lineinfo", "-Xcompiler", "-O3")
    assert both.cuda_capabilities == ("9.0a", "10.0f")
    *_, unlimited = kernel_sources.disjoint([hopper, replace(blackwell, cuda_capabilities=None)])
    assert unlimited.cuda_capabilities is None


def test_a_kernel_needs_a_capability_that_the_compiler_and_the_platform_have() -> None:
    kernel = Kernel("k", CUDA, (), (), cuda_capabilities=("5.0", "8.7"))
    assert capabilities(kernel, Release(13, 0), "aarch64-linux") == ("8.7",)
    with pytest.raises(VariantError, match=r"CUDA 13\.0 for x86_64-linux compiles for none of 5\.0, 8\.7"):
        capabilities(kernel, Release(13, 0), X86_64)


@pytest.mark.parametrize(
    ("listed", "only", "cuda", "expected"),
    [
        ("12.0+PTX 9.0a 5.0 10.0f", "", Release(13, 0), "9.0a 10.0f 12.0+PTX"),
        ("12.0+PTX 9.0a 5.0 10.0f", "", Release(12, 6), "5.0 9.0a"),
        ("12.0+PTX 9.0a 8.0", "9.0", Release(13, 0), "9.0a"),
        ("12.0+PTX 9.0a 8.0", "12.0 9.0", Release(13, 0), "9.0a 12.0+PTX"),
        ("12.0+PTX 9.0a 8.0", "8.9", Release(13, 0), "8.0"),  # code for 8.0 runs on 8.9
        ("12.0+PTX 9.0a 8.0", "7.5", Release(13, 0), "8.0"),  # nothing at or below it: the lowest, for its symbols
    ],
)
def test_capabilities_are_intersected_and_keep_their_suffixes(
    listed: str, only: str, cuda: Release, expected: str
) -> None:
    limits = {"cuda_capabilities": tuple(listed.split()), "only_capabilities": tuple(only.split())}
    assert capabilities(Kernel("k", CUDA, (), (), **limits), cuda, X86_64) == tuple(expected.split())


def test_without_capabilities_a_kernel_gets_all_and_ptx_of_the_newest() -> None:
    kernel = Kernel("k", CUDA, (), ())
    every = capabilities(kernel, Release(13, 0), X86_64)
    assert every[0] == "7.5"
    assert every[-1] == "12.1+PTX"
    assert sum("PTX" in capability for capability in every) == 1
    # Jetson's capabilities are compiled for aarch64 only.
    assert set(capabilities(kernel, Release(13, 0), "aarch64-linux")) - set(every) == {"8.7", "11.0"}


@pytest.mark.parametrize(
    ("listed", "only", "limited", "warned"),
    [
        (("11.0a", "12.0a"), "9.0", True, True),
        (("8.0", "9.0a"), "9.0", True, False),
        (("8.0", "10.0a"), "9.0", True, True),  # 8.0 does not run on 9.0
        (("8.0+PTX", "10.0a"), "9.0", True, False),
        (("9.0a",), "9.0", False, False),
        (None, "9.0", True, False),
    ],
)
def test_a_build_for_one_capability(listed: tuple[str, ...] | None, only: str, limited: bool, warned: bool) -> None:
    """Code that runs on no such GPU gives a warning; a list without another capability is complete."""
    kernel = Kernel("k", CUDA, (), ("a.cu",), cuda_capabilities=listed)
    result = offered.limited(Project(Path("p"), "k", 1, "mit", (CUDA,), TorchFramework(), (kernel,)), [only])
    assert bool(result.kernels[0].only_capabilities) is limited
    assert any("runs on a GPU of capability 9.0" in warning for warning in result.warnings) is warned
