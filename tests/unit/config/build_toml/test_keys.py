"""Both readers know the same keys of every table, and the same backends and dependencies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels._rust import Build

from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import framework, general, kernel, more, ours, torch, write

UNKNOWN = {
    "[general]": general(zz="1"),
    **{f"[general.{name}]": more(f"[general.{name}]\nzz = 1\n") for name in ("hub", "cuda", "neuron", "tpu", "xpu")},
    "[torch]": torch("zz = 1"),
    "[torch-noarch]": framework("[torch-noarch]\nzz = 1"),
    "[tvm-ffi]": framework("[tvm-ffi]\nsrc = []\nzz = 1"),
    **{f"[kernel] for {name}": kernel(name, "zz = 1") for name in ("cpu", "cuda", "metal", "rocm", "xpu")},
    "backends": general(backends='["zz"]'),
    "backends with kernels": kernel("zz"),
    "depends": kernel("cpu", depends='["zz"]'),
}


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_both_expect_the_same_keys(home: Path, text: str) -> None:
    write(home, text)
    with pytest.raises(ValueError, match="Expected one of ") as caught:
        Build.open(home)
    expected = set(str(caught.value).partition("Expected one of ")[2].strip().split(", "))
    error = ours(home)
    assert isinstance(error, ConfigError)
    # The public parser takes the key that tells the kinds of kernels apart out of the table first.
    found = set(re.findall(r"`([^`]+)`", error.message.partition("expected one of ")[2])) - {"language"}
    assert found == expected
