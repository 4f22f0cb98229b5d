"""The loader of wheels, and the rule for other environments, pick the variant that the public client picks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from kernels import archs as archs_of_client
from kernels import variants as client
from kernels.backends import CPU, CUDA, Backend, Neuron, ROCm
from packaging.version import Version

from kernel_builder.checks import fit
from kernel_builder.config import known_backends
from kernel_builder.config.project import Project, TorchFramework
from kernel_builder.config.variant import Variant
from kernel_builder.wheel import metadata
from kernel_format.metadata import PackageMetadata
from kernel_format.release import Release
from kernel_format.variant import parse

NAMES = (
    *(f"torch-stable-abi210-{backend}-x86_64-linux" for backend in ("cpu", "cu126", "cu128", "cu130")),
    "torch-stable-abi210-cu130-aarch64-linux",
    "torch-stable-abi212-cu130-x86_64-linux",
    "torch29-cxx11-cu128-x86_64-linux",
    *(f"torch214-cxx11-{backend}-x86_64-linux" for backend in ("cpu", "cu130", "cu132")),
    *("torch-cpu", "torch-cuda", "torch-rocm", "torch-neuron"),
)
BACKENDS: tuple[Backend, ...] = (
    CPU(),
    Neuron(),
    ROCm(Version("7.1")),
    *(CUDA(Version(release)) for release in ("12.6", "12.8", "12.9", "13.0", "13.2")),
)


def clients_choice(
    names: Sequence[str],
    backend: Backend,
    torch: str | None,
    tvm_ffi: str | None = None,
    *,
    platform: str = "x86_64",
    cxx11: bool = True,
) -> str | None:
    """Return the variant that the public client picks."""
    versions = [Version(version) if version else None for version in (torch, tvm_ffi)]
    system = (backend, platform, "linux", versions[0], cxx11, versions[1])
    best, _ = client._resolve_variant_for_system([client.parse_variant(name) for name in names], *system)
    return best[0].variant_str if best else None


@pytest.fixture(scope="module")
def loader() -> dict[str, Any]:
    """The functions of the loader, which are read without the call at its end."""
    source = (resources.files("kernel_builder") / "templates" / "wheel_init.py").read_text()
    functions, call, _ = source.rpartition("_load(__name__, __file__)")
    assert call
    defined: dict[str, Any] = {}
    exec(functions, defined)
    return defined


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.variant_str)
@pytest.mark.parametrize("platform", ["x86_64", "aarch64"])
def test_the_choice_is_the_clients(loader: dict[str, Any], backend: Backend, platform: str) -> None:
    # Every wheel with one to three of the variants, and one with all, beside every Torch.
    wheels = [names for count in (1, 2, 3, len(NAMES)) for names in itertools.combinations(NAMES, count)]
    cuda = (backend.version.major, backend.version.minor) if isinstance(backend, CUDA) else None
    chosen = set()
    for torch, cxx11 in (((2, 9), True), ((2, 10), True), ((2, 12), True), ((2, 14), True), ((2, 14), False)):
        for names in wheels:
            best = clients_choice(names, backend, f"{torch[0]}.{torch[1]}", platform=platform, cxx11=cxx11)
            ours = loader["choose"](names, torch, backend.name, cuda, f"{platform}-linux", True, cxx11)
            assert ours == best, (names, torch)
            chosen.add(ours)
    assert len(chosen) > 1


def test_the_limited_api_is_not_for_every_python(loader: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_is_unsupported_free_threaded_build", lambda: True)
    for names in itertools.combinations(NAMES, 2):
        ours = loader["choose"](names, (2, 14), "cpu", None, "x86_64-linux", False)
        assert ours == clients_choice(names, CPU(), "2.14")
    assert loader["choose"](NAMES, (2, 14), "cuda", None, "x86_64-linux") == "torch-cuda", "KERNEL_BACKEND=cuda"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0)])
def test_the_architectures_are_those_that_the_client_accepts(
    loader: dict[str, Any], capability: tuple[int, int]
) -> None:
    known = ("7.5", "8.0", "8.6", "9.0", "9.0a", "9.0a+PTX", "10.0a", "10.0f", "9.0+PTX", "12.0", "gfx942", "14")
    for archs in (archs for count in (1, 2, len(known)) for archs in itertools.combinations(known, count)):
        assert loader["has_code"](archs, capability) == archs_of_client._supports_cuda_capability([*archs], capability)


@pytest.mark.parametrize(
    ("names", "requirement"),
    [
        (NAMES[:6], "torch>=2.10"),
        (("torch29-cxx11-cpu-x86_64-linux", NAMES[5]), "torch>=2.9"),
        (("torch213-cxx11-cpu-x86_64-linux", "torch214-cxx11-cpu-x86_64-linux"), "torch<2.15,>=2.13"),
        (("torch-cpu", "torch-cuda"), "torch"),
    ],
)
def test_pip_is_told_which_torch_a_wheel_is_for(names: tuple[str, ...], requirement: str) -> None:
    project = Project(Path(), "some-kernel", 2, "apache-2.0", ("cpu",), TorchFramework(), ())
    about = metadata(project, [Variant.parse(name) for name in names], "text", "some-kernel", "2.0", {})
    assert [str(required) for required in about.requires_dist or ()] == [requirement]
    assert (about.name, str(about.version), about.license_expression) == ("some-kernel", "2.0", "Apache-2.0")


VARIANTS = tuple(name for name in NAMES if name != "torch-neuron")
ALONE = ("tvm-ffi01-cu130-x86_64-linux", "torch212-cpu-aarch64-darwin")


@pytest.mark.parametrize("backend", [CPU(), ROCm(Version("7.1")), CUDA(Version("12.8")), CUDA(Version("13.2"))])
@pytest.mark.parametrize("torch", [None, "2.9", "2.10", "2.12", "2.14"])
@pytest.mark.parametrize("tvm_ffi", [None, "0.1"])
def test_the_rule_is_the_clients(backend: Backend, torch: str | None, tvm_ffi: str | None) -> None:
    release = getattr(backend, "version", None)
    environment = fit.Environment(
        python="3.12",
        platform="x86_64-linux",
        torch=Release.parse(torch) if torch else None,
        backend=known_backends.get(backend.name),
        release=Release(release.major, release.minor) if release else None,
        capability=None,
        kernels="0.17.2",
        tvm_ffi=Release.parse(tvm_ffi) if tvm_ffi else None,
    )
    for names in (VARIANTS, *((name,) for name in (*VARIANTS, *ALONE))):
        ours = fit.choose(map(parse, names), environment)
        assert (ours.name if ours else None) == clients_choice(names, backend, torch, tvm_ffi), names


@pytest.mark.parametrize(
    ("archs", "minver", "capability", "expected"),
    [
        (("8.0", "9.0a"), None, "9.0", ()),
        (("8.0", "9.0a"), None, None, ()),
        (("8.0", "9.0a"), "0.18.0", "9.0", ("kernels 0.18.0 or later",)),
        (("8.0", "9.0a"), None, "10.0", ("a GPU of another capability than 10.0: there is code for 8.0, 9.0a",)),
    ],
)
def test_metadata_is_checked_as_at_a_load(
    archs: tuple[str, ...], minver: str | None, capability: str | None, expected: tuple[str, ...]
) -> None:
    here = fit.Environment(
        "3.12", "x86_64-linux", Release(2, 14), known_backends.get("cuda"), Release(13, 0), capability, "0.17.2"
    )
    metadata = PackageMetadata(archs=archs, kernels_minver=minver)
    assert fit.changes(parse("torch-stable-abi210-cu130-x86_64-linux"), metadata, here) == expected


def test_a_client_that_transformers_does_not_accept_is_named() -> None:
    here = fit.Environment(
        "3.12", "x86_64-linux", None, known_backends.get("cpu"), None, None, "0.17.2",
        transformers=("5.24.0", "kernels<0.19,>=0.18.2"),
    )  # fmt: skip
    assert here.client_conflict == "kernels<0.19,>=0.18.2"
