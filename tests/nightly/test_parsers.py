"""Parsers of files that other users publish get ten minutes of fuzzing: no traceback, and no input that takes 5 s."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.nightly.conftest import SECONDS
from tests.support.programs import run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.attack,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("atheris") is None, reason="pip install atheris"),
]


@pytest.mark.parametrize("target", ["elf", "metadata", "card", "signature", "names", "wheel"])
def test_no_file_makes_a_parser_fail(tmp_path: Path, target: str) -> None:
    if target == "elf":
        shutil.copy(str(yaml._yaml.__file__), tmp_path / "library.so")  # type: ignore[attr-defined]
    script = Path(__file__).with_name("fuzz_parsers.py")
    run(sys.executable, script, target, tmp_path, str(int(SECONDS)), errors="replace")
