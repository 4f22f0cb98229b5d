"""Edition 6 against the public parser's rules of release 0.18, which `public_rules` restates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.config import build_toml, project
from kernel_format.errors import ConfigError
from tests.support import public_rules
from tests.unit.config.build_toml.conftest import (
    TORCH,
    framework,
    general,
    in_edition_6,
    kernel,
    ours,
    torch,
    write,
)
from tests.unit.config.build_toml.test_rejected import REJECTED

TVM_FFI = in_edition_6(general(backends='["cpu"]')).replace(TORCH, "[tvm-ffi]\n").partition("[kernel.c]")[0]
RUST = '[kernel.r]\nlanguage = "rust-cpu"\ncargo-manifest = "Cargo.toml"\ndepends = []\nsrc = ["lib.rs"]\n'
UPSTREAMS = '["https://github.com/o/a", "https://github.com/o/b"]'


@pytest.mark.parametrize(
    "text",
    [
        TVM_FFI + RUST,
        general(upstream=UPSTREAMS),
        general(upstream="[]"),
        general(upstream='["git@github.com:o/r.git"]'),
        framework("[tvm-ffi]"),
        torch('stable-abi = {cpu = "2.9", cuda = "2.12"}'),
        *(kernel(backend) for backend in ("cpu", "cuda", "metal", "rocm", "xpu")),
    ],
)
def test_both_accept(home: Path, text: str) -> None:
    text = in_edition_6(text)
    assert public_rules.faults(toml_file.parse(text, "build.toml")) == []
    write(home, text)
    assert isinstance(read := ours(home), project.Project), str(read)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(edition="7"), "[general] edition", "this is edition 7; expected edition 6"),
        (general(edition="6"), "[kernel.c] backend", "edition 6 has `language`"),
        *(
            (in_edition_6(general(upstream=f'["https://github.com/o/r", {url}]')), "[general] upstream", message)
            for url, message in (("1", "expected a string"), ('"ftp://github.com/o/r"', "is not the URL"))
        ),
        (in_edition_6(general(upstream="{}")), "[general] upstream", "expected a string or an array, got a table"),
        (in_edition_6(general()) + RUST, "[kernel.r] language", "needs the framework [tvm-ffi]"),
        (TVM_FFI + RUST.replace('cargo-manifest = "Cargo.toml"\n', ""), "[kernel.r] cargo-manifest", "is missing"),
        (TVM_FFI + f'{RUST}include = ["."]\n', "[kernel.r] include", "unknown key"),
        (in_edition_6(kernel("cpu", 'cargo-manifest = "Cargo.toml"')), "[kernel.x] cargo-manifest", "unknown key"),
        (TVM_FFI + RUST.replace("rust-cpu", "rust-cuda"), "[kernel.r] language", "'rust-cuda' is not the language"),
    ],
)
def test_both_reject(home: Path, text: str, where: str, message: str) -> None:
    assert public_rules.faults(toml_file.parse(text, "build.toml"))
    write(home, text)
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert str(error.where).endswith(where)
    assert message in error.message
    assert error.hint


@pytest.mark.parametrize("text", [text for text in REJECTED if len(text) < 10_000])
def test_files_that_both_reject_in_edition_5_are_rejected(home: Path, text: str) -> None:
    write(home, in_edition_6(text))
    assert isinstance(ours(home), ConfigError)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(upstream=UPSTREAMS), "[general] upstream", "of edition 6"),
        (framework("[tvm-ffi]"), "[tvm-ffi] src", "optional since edition 6"),
        (kernel("cpu").replace('backend = "cpu"', 'language = "rust-cpu"'), "[kernel.c] language", "of edition 6"),
    ],
)
def test_values_of_edition_6_in_an_older_file_name_the_release(home: Path, text: str, where: str, message: str) -> None:
    for older in (text, text.replace("edition = 5\n", "")):
        write(home, older)
        error = ours(home)
        assert isinstance(error, ConfigError)
        assert str(error.where).endswith(where)
        assert message in error.message
        assert "the public builder's release 0.18" in error.message
        assert "update-build" in str(error.hint)


def test_the_schema_has_the_same_keys_as_the_rules() -> None:
    tables, definitions = build_toml.SCHEMA["properties"], build_toml.SCHEMA["definitions"]
    for name, rules in public_rules.TABLES.items():
        assert set(tables[name]["properties"]) == {key.rstrip("!") for key in rules}
    by_language = {
        language: set(definitions[entry["then"]["$ref"].rpartition("/")[2]]["properties"])
        for entry in tables["kernel"]["additionalProperties"]["allOf"]
        for language in entry["if"]["properties"]["language"]["enum"]
    }
    rules_by_language = public_rules.KERNELS.items()
    assert by_language == {language: {key.rstrip("!") for key in rules} for language, rules in rules_by_language}
