"""The rule for environments other than this one is that of the public client."""

from __future__ import annotations

import pytest
from kernels import variants as client
from kernels.backends import CPU, CUDA, Backend, ROCm
from packaging.version import Version

from kernel_builder.checks import fit
from kernel_builder.config import known_backends
from kernel_format.metadata import PackageMetadata
from kernel_format.release import Release
from kernel_format.variant import parse
from tests.unit.package.test_wheel_choice import NAMES

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
    versions = [Version(version) if version else None for version in (torch, tvm_ffi)]
    for names in (VARIANTS, *((name,) for name in (*VARIANTS, *ALONE))):
        system = (backend, "x86_64", "linux", versions[0], True, versions[1])
        best, _ = client._resolve_variant_for_system([client.parse_variant(name) for name in names], *system)
        ours = fit.choose(map(parse, names), environment)
        assert (ours.name if ours else None) == (best[0].variant_str if best else None), names


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
