"""Variant names as `kernel_format` reads them, without the builder."""

from __future__ import annotations

import pytest

from kernel_builder.config import known_backends
from kernel_format import variant
from kernel_format.errors import VariantError


@pytest.mark.parametrize(
    ("name", "backend", "release", "platform"),
    [
        ("torch214-cxx11-cu130-x86_64-linux", "CUDA", "13.0", "x86_64-linux"),
        ("torch-stable-abi210-cpu-aarch64-linux", "CPU", None, "aarch64-linux"),
        ("torch-stable-abi210-cu128-x86_64-windows", "CUDA", "12.8", "x86_64-windows"),
        ("torch214-cxx11-xpu20252-x86_64-linux", "XPU", "2025.2", "x86_64-linux"),
        ("torch212-metal-aarch64-darwin", "Metal", None, "aarch64-darwin"),
        ("tvm-ffi01-rocm71-x86_64-linux", "ROCm", "7.1", "x86_64-linux"),
        ("torch-neuron", "Neuron", None, None),
    ],
)
def test_names_of_any_builder_are_read_and_written(
    name: str, backend: str, release: str | None, platform: str | None
) -> None:
    read = variant.parse(name)
    assert (read.backend.title, read.release and str(read.release), read.platform) == (backend, release, platform)
    assert read.name == name


@pytest.mark.parametrize("name", ["torch-vulkan", "torch214-cu130-x86_64-linux", "torch212-cxx11-metal-aarch64-darwin"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(VariantError, match="is not a variant's name"):
        variant.parse(name)


def test_the_builder_spells_its_back_ends_as_the_format_does() -> None:
    built_in = [(known.name, known.title, known.prefix) for known in map(known_backends.get, known_backends.NAMES)]
    assert built_in == [(known.name, known.title, known.prefix) for known in variant.BACKENDS]
