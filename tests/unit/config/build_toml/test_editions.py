"""Edition 6 has the additions of the public release 0.18; editions 3 to 5 are compared with their converted files."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.config import build_toml, editions
from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError
from tests.support import public_parser
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    TORCH,
    assert_same_values,
    framework,
    general,
    in_edition_6,
    kernel,
    theirs,
    torch,
    write,
)
from tests.unit.config.build_toml.test_both_readers import ACCEPTED, REJECTED, refused

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
def test_edition_6_is_read(home: Path, text: str) -> None:
    write(home, in_edition_6(text))
    assert read_project(home)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(edition="7"), "[general] edition", "this is edition 7; expected edition 6"),
        (general(edition="6"), "[kernel.c] backend", "edition 6 uses `language`"),
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
def test_mistakes_in_edition_6_are_refused(home: Path, text: str, where: str, message: str) -> None:
    error = refused(home, text)
    assert str(error.where).endswith(where) and message in error.message


@pytest.mark.parametrize("text", [text for text in REJECTED if len(text) < 10_000])
def test_files_that_both_reject_in_edition_5_are_rejected(home: Path, text: str) -> None:
    refused(home, in_edition_6(text))


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(upstream=UPSTREAMS), "[general] upstream", "needs edition 6"),
        (framework("[tvm-ffi]"), "[tvm-ffi] src", "optional since edition 6"),
        (kernel("cpu").replace('backend = "cpu"', 'language = "rust-cpu"'), "[kernel.c] language", "needs edition 6"),
    ],
)
def test_values_of_edition_6_in_an_older_file_name_the_release(home: Path, text: str, where: str, message: str) -> None:
    for older in (text, text.replace("edition = 5\n", "")):
        error = refused(home, older)
        assert str(error.where).endswith(where) and message in error.message
        assert "the public builder's release 0.18" in error.message
        assert "update-build" in str(error.hint)


# Edition 4 has no `edition`, no dependencies on kernels, no [general.tpu], and one version as `stable-abi`.
EDITION_4 = [
    general(edition=None),
    general(edition=None, python_depends='["einops"]', source='"https://github.com/o/r"', xpu="{}")
    + '[general.cuda]\nminver = "12.6"\nmaxver = "13.2"\n[general.hub]\nrepo-id = "o/k"\nbranch = "v1"\n',
    general(edition=None).replace(TORCH, '[torch]\nstable-abi = "2.10"\nminver = "2.10"\ncxx-flags = ["-O2"]\n'),
    general(edition=None).replace(TORCH, '[torch-noarch]\npyext = ["py"]\ncuda_capabilities = ["9.0"]\n'),
]
# Edition 3 needs neither `version` nor, for Python only, a framework.
EDITION_3 = [general(edition=None, version=None), general(edition=None, version=None).replace(TORCH + CPU + CUDA, "")]
# Other forms of tables.
FORMS = [
    'general.name = "a-b"\ngeneral.backends = ["cpu"]\ngeneral.license = "mit"\n'
    'kernel.c.backend = "cpu"\nkernel.c.depends = []\nkernel.c.src = []\ntorch = {}\n',
    'general = { name = "a-b", backends = ["cpu"], license = "mit" }\n[torch]\n'
    '[kernel]\nc = { depends = [], src = [], "backend" = """cpu""" }\n',
    '[torch]\n[general]\nbackends = ["cpu"]\nlicense = "mit"\nname = "a-b"',  # without an end of line
]


def converted(home: Path, license: str | None = None) -> str:
    """Return the project's build.toml in edition 6."""
    path = home / build_toml.FILE
    return editions.converted(build_toml.read_text(path), path, license)


def test_a_kernel_that_is_no_table_is_left_to_the_reader(home: Path) -> None:
    write(home, general() + "\n[kernel]\nd = 1\n")
    assert "d = 1" in converted(home)


@pytest.mark.parametrize("text", EDITION_4)
def test_both_accept_edition_4(home: Path, text: str) -> None:
    write(home, text)
    assert_same_values(home)
    assert read_project(home).warnings == (editions.NO_EDITION,)


@pytest.mark.parametrize("text", [*EDITION_3, *(general(edition=str(edition)) for edition in (3, 4))])
def test_edition_3_is_read(home: Path, text: str) -> None:
    """The public builder of release 0.18 reads it, the parser in the client of 0.17.2 does not."""
    write(home, text)
    assert theirs(home) is None
    assert bool(read_project(home).warnings) == ("edition" not in text)


def test_edition_2_is_refused_with_the_tool_that_reads_it(home: Path) -> None:
    write(home, general(edition="2"))
    for refuse in (lambda: build_toml.read(home / build_toml.FILE, home), lambda: converted(home)):
        with pytest.raises(ConfigError, match=r"\[general\] edition: this is edition 2; expected edition 6") as caught:
            refuse()
        assert "`kernel-builder update-build` of a release of the Hub's builder" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text", [*EDITION_3, *EDITION_4, *FORMS, general(edition="3"), general(edition="4"), *ACCEPTED]
)
def test_a_converted_file_is_of_edition_6(home: Path, tmp_path: Path, text: str) -> None:
    write(home, text)
    before = None
    with suppress(ConfigError):
        before = read_project(home)
    new = converted(home)
    write(home, new)
    assert toml_file.parse(new, "build.toml")["general"]["edition"] == 6
    assert public_parser.read(new, tmp_path)
    after = read_project(home)
    assert editions.NO_EDITION not in after.warnings
    if before:
        warnings = tuple(warning for warning in before.warnings if warning != editions.NO_EDITION)
        assert replace(before, warnings=warnings) == after
    assert converted(home) == new


def test_comments_and_formatting_are_kept(home: Path) -> None:
    text = (
        "# A kernel.\n[general]\nname    = 'a-b' # the name\nupstream = 'https://github.com/o/r' # taken from\n"
        "version = 1 # the API\nlicense = 'mit'\n"
        "backends = [\n  'cpu', # only\n]\n\n# Where it goes.\n[general.hub]\nrepo-id = 'o/k'\n\n"
        "[torch]\nsrc = ['a.cpp',]\n\n[kernel.c]\nbackend   = 'cpu' # g++\ndepends = []\nsrc = []\n"
    )
    for old in (text, text.replace("\n", "\r\n")):
        write(home, old)
        end = "\r\n" if "\r" in old else "\n"
        new = old.replace(f"]{end}{end}# Where", f"]{end}edition = 6{end}{end}# Where")
        new = new.replace("'https://github.com/o/r'", '["https://github.com/o/r"]')
        assert converted(home) == new.replace("backend   = 'cpu'", "language   = 'cpp-cpu'")


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(edition=None, license=None), "[general] license", "is missing"),
        (general(edition="7"), "[general] edition", "this is edition 7"),
        (general().replace('"cpu"\ndepends', '"cpp"\ndepends'), "[kernel.c] backend", "'cpp' is not a backend"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused(home: Path, text: str, where: str, message: str) -> None:
    write(home, text)
    with pytest.raises(ConfigError, match=re.escape(where) + ": .*" + re.escape(message)):
        converted(home)
