"""Parsers of files that other users publish get ten minutes of fuzzing: no traceback, and no input that takes 5 s."""

from __future__ import annotations

import shutil
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.nightly.conftest import SECONDS
from tests.support.files import elf_file
from tests.support.programs import run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.attack,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("atheris") is None, reason="pip install atheris"),
]

TARGET = b"hipv4-amdgcn-amd-amdhsa--gfx942"
DEVICE_CODE = {  # a container whose sizes are 0, a bundle
    ".nv_fatbin": struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0),
    ".hip_fatbin": b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<QQQQ", 1, 96, 0, len(TARGET)) + TARGET,
}


@pytest.mark.parametrize("target", ["elf", "metadata", "card", "signature", "names", "wheel"])
def test_no_file_makes_a_parser_fail(tmp_path: Path, target: str) -> None:
    if target == "elf":
        shutil.copy(str(yaml._yaml.__file__), tmp_path / "library.so")  # type: ignore[attr-defined]
        for section, code in DEVICE_CODE.items():
            (tmp_path / section).write_bytes(elf_file(section, code))
    script = Path(__file__).with_name("fuzz_parsers.py")
    run(sys.executable, script, target, tmp_path, str(int(SECONDS)), errors="replace")
