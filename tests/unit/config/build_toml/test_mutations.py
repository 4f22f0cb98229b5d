"""Both readers of build.toml agree on randomly changed files."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_builder import toml_file
from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import (
    DEPENDENCY,
    assert_same_values,
    framework,
    general,
    kernel,
    ours,
    theirs,
    torch,
    write,
)
from tests.unit.config.build_toml.test_editions import EDITION_4
from tests.unit.config.build_toml.test_stricter import STRICTER

# Valid files that `mutations` changes.
SEEDS: list[dict[str, Any]] = [
    toml_file.parse(text, "build.toml")
    for text in (
        general(
            kernel_depends=f"[{DEPENDENCY}]", python_depends='["einops"]', source='"https://github.com/o/r"', xpu="{}"
        )
        + '[general.cuda]\nminver = "12.6"\nmaxver = "13.2"\n[general.hub]\nrepo-id = "o/k"\nbranch = "v1"\n',
        torch('stable-abi = {cuda = "2.10"}\ninclude = ["."]\nminver = "2.10"\npyext = ["py"]\ncxx-flags = ["-O2"]')
        + '[kernel.x]\nbackend = "rocm"\ndepends = []\nsrc = []\nrocm-archs = ["gfx942"]\n',
        kernel(
            "cuda", 'cuda-capabilities = ["9.0a"]', 'cuda-flags = ["-g"]', 'cuda-minver = "12.8"', 'include = ["."]'
        ),
        framework('[torch-noarch]\ncuda_capabilities = ["9.0"]\nrocm_archs = ["gfx90a"]\npyext = ["py"]'),
        framework('[tvm-ffi]\nsrc = ["a.cpp"]\ncxx-flags = ["-O2"]\npyext = ["py"]'),
        *EDITION_4,
    )
]


WORDS = [
    "",
    "a",
    "cuda",
    "tpu",
    "torch",
    "einops",
    "2.10",
    "2",
    "9.0",
    "a.cpp",
    "..",
    "src",
    "o/k",
    "version",
    "edition",
]


values = st.recursive(
    st.booleans() | st.integers(-2, 2**63) | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=4,
)


def dump(value: Any) -> str:
    """Return a value as TOML, with inline tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dump, value)) + "]"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf"}.get(str(value), str(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """Return a valid document with one to three changes.

    A change deletes, renames or adds a key, or replaces or repeats a value.
    """
    document = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 3))):
        node: Any = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 3)):
                node = node[key]
                continue
            change = draw(st.sampled_from(["delete", "replace", "double", "rename", "add"]))
            if change == "delete":
                del node[key]
            elif change == "replace":
                node[key] = draw(values)
            elif isinstance(node, list):
                node.append(node[key] if change == "double" else draw(values))
            elif change == "rename":
                name = draw(st.sampled_from(WORDS) | st.just(key.replace("-", "_")) | st.just(key[:-1]))
                node[name] = node.pop(key)
            else:
                node[draw(st.sampled_from(WORDS))] = draw(values)
            break
    return document


@settings(max_examples=900, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_mutations(home: Path, document: dict[str, Any]) -> None:
    write(home, "".join(f"{json.dumps(key)} = {dump(value)}\n" for key, value in document.items()))
    build, mine = theirs(home), ours(home)
    if build is None:
        assert isinstance(mine, ConfigError)
    elif isinstance(mine, ConfigError):
        assert any(re.search(message, mine.message) for message, _ in STRICTER.values()), str(mine)
    else:
        assert_same_values(home)
