"""The emulator names the kernel, the thread and the fault; else its users take a faulty kernel for a right one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.develop.emulated_sources import translate
from kernel_emulator import DIRECTORY, FLAGS
from tests.support.places import SOURCES

SOURCE = Path(__file__).with_name("faults.cu")
# By warp size.
DEFINES = {
    32: ["-DMaskType=unsigned", "-DkMask=0xffffffffu"],
    64: ["-DUSE_ROCM", "-DMaskType=uint64_t", "-DkMask=~uint64_t{0}"],
}
# Kernel -> the emulator's message.
FAULTS = toml_file.read(SOURCE.with_suffix(".toml"))


@pytest.fixture(scope="module", params=[32, 64])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Compile the kernels, which a `main` launches by name."""
    directory, warp_size = tmp_path_factory.mktemp("faults"), request.param
    source = translate(SOURCE.name, SOURCE.read_text(), is_device_source=True, is_header=False)
    (directory / "faults.cpp").write_text(source)
    sources = sorted(DIRECTORY.glob("*.cpp"))
    common = ["g++", "-std=gnu++17", f"-I{DIRECTORY}", f"-DEMULATED_WARP_SIZE={warp_size}", *DEFINES[warp_size]]
    for arguments in (
        [*FLAGS, "-Wall", "-Wextra", "-c", "faults.cpp"],
        ["-O1", "-Wall", "-Wextra", "-c", *sources],
        ["-o", "faults", "faults.o", *(f"{source.stem}.o" for source in sources)],
    ):
        subprocess.run([*common, *arguments], cwd=directory, check=True)
    return warp_size, directory / "faults"


def test_comments_and_texts_are_not_translated() -> None:
    text = translate("k.cu", SOURCES["commented_kernel"], is_device_source=False, is_header=True)
    assert re.sub(" +\n", "\n", text) == SOURCES["commented_kernel_for_the_emulator"]


def output_of(program: Path, kernel: str) -> str:
    return subprocess.run([program, kernel], check=True, capture_output=True, text=True).stdout.strip()


def test_right_kernels_have_right_results(program: tuple[int, Path]) -> None:
    assert output_of(program[1], "right") == "16642 no error"
    assert output_of(program[1], "conversions") == "right"
    lanes = range(128 - program[0], 128)

    def of(values: Iterable[bool]) -> int:
        return sum(value << lane for lane, value in enumerate(values))

    expected = {
        "ballot": [of(i % 3 == 0 for i in lanes)] * 2,
        "match_any": [of(i % 4 == 0 for i in lanes), of(i % 4 == 3 for i in lanes)],
        "any": [1, 1],
        "all": [1, 1],
        "shfl_up": [lanes[0], 126],
        "shfl_down": [lanes[2], 127],
        "reduce_add": [sum(lanes)] * 2,
        "reduce_min": [127, 127],
        "syncthreads_count": [5, 5],
    }
    printed = [line.split() for line in output_of(program[1], "collectives").splitlines()]
    assert {name: [int(value, 16) for value in values] for name, *values in printed} == expected


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_fault_is_named(program: tuple[int, Path], kernel: str) -> None:
    text = output_of(program[1], kernel)
    assert text.startswith(f"{kernel}, block (0, 0, 0), thread (")
    assert re.search(FAULTS[kernel], text), text


def test_uninitialized_shared_memory_and_the_order_of_threads_change_results(program: tuple[int, Path]) -> None:
    assert "nan" in output_of(program[1], "not_written")
    # Every second block runs its threads in descending order.
    assert output_of(program[1], "order") == "0 127"


def test_code_for_warps_of_32_fails_with_other_sizes(program: tuple[int, Path]) -> None:
    warp_size, executable = program
    results = [output_of(executable, kernel) for kernel in ("warp_of_32", "mask_of_32")]
    if warp_size == 32:
        assert results == ["128 no error", "1 no error"]
    else:
        assert results[0] != "128 no error"
        assert "thread (32, 0, 0): calls __shfl_sync (faults.cu" in results[1]
