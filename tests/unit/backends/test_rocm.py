"""ROCm: the plan of its variants, and the refused projects. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernels import variants as client
from kernels.backends import ROCm
from packaging.version import Version

from kernel_builder.backends.rocm import ROCM, hipify
from kernel_builder.config import offered
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, Variant
from kernel_builder.probe_cache import ProbeCache
from kernel_builder.steps import buildable
from kernel_builder.steps.graph import Graph
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ConfigError, VariantError
from tests.support.files import append, replace, write_files
from tests.support.places import SOURCES
from tests.unit.package.test_wheel_choice import clients_choice

Copy = Callable[..., Path]

KERNEL = SOURCES["rocm_kernel"].replace('"scale/row_norm.cu", ', "")


@pytest.fixture
def project(copy_project: Copy) -> Path:
    """The sample project, with a variant for ROCm of its CUDA source."""
    root = copy_project("stable-scale")
    replace(root / "build.toml", '["cpu", "cuda"]', '["cpu", "cuda", "rocm"]')
    append(root / "build.toml", KERNEL)
    return root


def of_rocm(project: Project, *, whole: bool = False) -> list[Variant]:
    return [variant for variant in offered.variants(project, whole=whole) if variant.backend is ROCM]


def planned(root: Path) -> Graph:
    project = read_project(root)
    return plan([(project, of_rocm(project))], Toolchains())


def test_the_client_loads_each_variant_with_a_torch_for_its_release_only(project: Path) -> None:
    names = [variant.name for variant in of_rocm(read_project(project))]
    assert names == [f"torch-stable-abi210-rocm{digits}-x86_64-linux" for digits in ("71", "72")]
    # Full names of single Torch releases, which `--all` adds for old clients.
    every = [variant.name for variant in of_rocm(read_project(project), whole=True)]
    assert {*names, "torch213-cxx11-rocm72-x86_64-linux"} < {*every}
    for name in every:
        variant = Variant.parse(name)
        assert variant.name == name == client.parse_variant(name).variant_str
        assert variant.release
        torch = getattr(variant.framework, "release", Release(2, 10))
        for release in ROCM.releases():
            chosen = clients_choice([name], ROCm(Version(str(release))), str(torch))
            assert chosen == (name if release == variant.release else None)


def test_a_source_that_hipify_cannot_read_is_named(project: Path) -> None:
    source = project / "scale/scale_cuda.cu"
    source.write_bytes(source.read_bytes() + b"// gr\xfc\xdfe\n")
    with pytest.raises(ConfigError, match=f"^{source}: torch.utils.hipify cannot translate it.*UnicodeDecodeError"):
        planned(project)


def test_a_damaged_translation_is_replaced(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.cu": "#include <cuda_runtime.h>\n"})
    utils, kept = Path(torch.__file__).parent / "utils", ProbeCache(tmp_path / "kept")
    first = hipify.translate(utils, tmp_path, "a.cu", ["a.cu"], [], kept)
    for text in ("[]", "3", "{}"):
        write_files(tmp_path, {str(path): text for path in (tmp_path / "kept").iterdir()})
        assert hipify.translate(utils, tmp_path, "a.cu", ["a.cu"], [], kept) == first


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('stable-abi = "2.10"', "", r"no package index has a Torch for ROCm, whose headers \(c10/hip\)"),
        ('"gfx942", "gfx1100", "gfx941"', '"gfx941"', "no architecture is left: clang does not compile for gfx941"),
        ("-munsafe-fp-atomics", "-Bprograms", "chooses other programs"),
    ],
)
def test_what_cannot_be_compiled_is_refused(project: Path, old: str, new: str, words: str) -> None:
    replace(project / "build.toml", old, new)
    with pytest.raises((ConfigError, VariantError), match=words):
        buildable.available(read_project(project), Toolchains(), backends=["rocm"])
        planned(project)


def test_architectures_that_are_unknown_are_worth_a_word(project: Path) -> None:
    (notice,) = read_project(project).warnings
    assert notice == "[kernel.scale_rocm] rocm-archs: no known ROCm compiles for gfx941; it is skipped"


def test_a_build_can_be_limited_to_an_architecture(project: Path) -> None:
    limited = offered.limited(read_project(project), ["gfx1100", "8.0"])
    kernels = {kernel.backend.name: kernel for kernel in limited.kernels}
    assert ROCM.archs([kernels["rocm"]], None, "x86_64-linux") == ("gfx1100",)
    assert kernels["cuda"].only_capabilities == ("8.0",)
