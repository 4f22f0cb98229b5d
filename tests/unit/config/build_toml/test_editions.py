"""Files of editions before 5: what both readers accept and reject, and what `update-build` makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.backends import cuda
from kernel_builder.config import editions, project
from kernel_builder.config.rewrite import rewritten
from kernel_format.errors import ConfigError
from kernel_format.release import Release
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    DEPENDENCY,
    TORCH,
    assert_same_values,
    general,
    ours,
    theirs,
    write,
)

# Edition 4 has no `edition`, no dependencies on kernels, no [general.tpu], and one version as `stable-abi`.
EDITION_4 = [
    general(edition=None),
    general(edition=None, python_depends='["einops"]', source='"https://github.com/o/r"', xpu="{}")
    + '[general.cuda]\nminver = "12.6"\nmaxver = "13.2"\n[general.hub]\nrepo-id = "o/k"\nbranch = "v1"\n',
    general(edition=None).replace(TORCH, '[torch]\nstable-abi = "2.10"\nminver = "2.10"\ncxx-flags = ["-O2"]\n'),
    general(edition=None).replace(TORCH, '[torch-noarch]\npyext = ["py"]\ncuda_capabilities = ["9.0"]\n'),
    general(edition=None).replace(TORCH, '[tvm-ffi]\nsrc = ["torch-ext/binding.cpp"]\ncxx-flags = ["-O2"]\n'),
    general(edition=None, backends='["metal", "rocm", "tpu"]').replace('"cuda"\nd', '"rocm"\nd'),
]
# Edition 3 needs neither `version` nor, for Python only, a framework.
EDITION_3 = [
    general(edition=None, version=None),
    general(edition=None, version=None).replace(TORCH + CPU + CUDA, ""),
    general(edition=None).replace(TORCH + CPU + CUDA, ""),
    general(edition=None, version=None).replace(TORCH, '[tvm-ffi]\nsrc = ["torch-ext/binding.cpp"]\n'),
]
# Edition 2 has the backends in the kernels, and the range of CUDA releases in [general].
HEAD = '[general]\nname = "a-b"\nlicense = "mit"\n'
EDITION_2 = [
    f'{HEAD}cuda-minver = "12.6"\ncuda-maxver = "13.0"\nuniversal = false\n{TORCH}{CPU}{CUDA}',
    f"{HEAD}universal = true\n[torch]\nsrc = []\n",
]
# Edition 1 has languages, CUDA by default.
EDITION_1 = [
    f"{HEAD}{TORCH}{CPU}".replace('backend = "cpu"', 'language = "metal"'),
    f"{HEAD}{TORCH}{CUDA}".replace('backend = "cuda"\n', ""),
    f"{HEAD}{TORCH}{CUDA}".replace('backend = "cuda"', 'language = "cuda-hipify"\nrocm-archs = ["gfx942"]'),
    f'{HEAD}[torch]\nuniversal = true\npyext = ["py"]\n',
    f"{HEAD}{TORCH}{CUDA}".replace('backend = "cuda"', 'language = "cuda"')
    .replace('name = "a-b"\n', "")
    .replace("[torch]", '[torch]\nname = "a-b"'),
]
OLDER = [*EDITION_3, *EDITION_2, *EDITION_1]
ALL = [*EDITION_4, *OLDER]


@pytest.mark.parametrize("text", EDITION_4)
def test_both_accept_edition_4(home: Path, text: str) -> None:
    write(home, text)
    assert_same_values(home)
    read = ours(home)
    assert isinstance(read, project.Project)
    assert read.warnings == (editions.NO_EDITION,)


@pytest.mark.parametrize(
    "text",
    [
        *OLDER,
        general(edition=None, kernel_depends=f"[{DEPENDENCY}]"),
        general(edition=None, tpu="{}"),
        general(edition=None, cuda=f"{{kernel-depends = [{DEPENDENCY}]}}"),
        general(edition=None).replace("[torch]", '[torch]\nstable-abi = {cuda = "2.10"}'),
        *(general(edition=str(edition)) for edition in range(1, 5)),
    ],
)
def test_both_reject_other_editions(home: Path, text: str) -> None:
    write(home, text)
    assert theirs(home) is None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert str(error.where).endswith("[general] edition")
    assert "`kernel-builder update-build DIR`" in str(error.hint)


@pytest.mark.parametrize("text", [*ALL, general(edition="3"), general(edition="4")])
def test_a_rewritten_file_is_of_edition_5(home: Path, text: str) -> None:
    write(home, text)
    before = ours(home)
    old, new = rewritten(home / "build.toml")
    assert old == text
    write(home, new)
    assert_same_values(home)
    after = ours(home)
    assert isinstance(after, project.Project)
    assert after.warnings == ()
    assert after.version == 1
    if isinstance(before, project.Project):
        assert replace(before, warnings=()) == after
    assert rewritten(home / "build.toml") == (new, new)


def test_what_older_editions_mean(home: Path) -> None:
    def read(text: str) -> project.Project:
        write(home, text)
        write(home, rewritten(home / "build.toml")[1])
        parsed = ours(home)
        assert isinstance(parsed, project.Project)
        return parsed

    both = read(EDITION_2[0])
    assert tuple(map(str, both.backends)) == ("cpu", "cuda")
    assert both.backend_settings == {cuda.CUDA: {"minver": Release(12, 6), "maxver": Release(13, 0)}}
    hipified = read(EDITION_1[2])
    assert tuple(map(str, hipified.backends)) == ("cuda", "rocm")
    assert [(kernel.name, kernel.backend.name) for kernel in hipified.kernels] == [("g", "cuda"), ("g_rocm", "rocm")]
    assert hipified.kernels[1].rocm_archs == ("gfx942",)
    for universal in (EDITION_2[1], EDITION_1[3]):
        assert isinstance(read(universal).framework, project.TorchNoarch)
        assert tuple(map(str, read(universal).backends)) == ("cann", "cpu", "cuda", "metal", "neuron", "rocm", "xpu")


def test_comments_and_formatting_are_kept(home: Path) -> None:
    text = (
        "# A kernel.\n[general]\nname    = 'a-b' # the name\nversion = 1 # the API\nlicense = 'mit'\n"
        "backends = [\n  'cpu', # only\n]\n\n# Where it goes.\n[general.hub]\nrepo-id = 'o/k'\n\n"
        "[torch]\nsrc = ['a.cpp',]\n"
    )
    for old in (text, text.replace("\n", "\r\n")):
        write(home, old)
        end = "\r\n" if "\r" in old else "\n"
        api = f"version = 1 # the API{end}"
        assert rewritten(home / "build.toml")[1] == old.replace(api, f"{api}edition = 5{end}")


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (general(edition=None, license=None), "[general] license", "is missing"),
        (general(edition=None, more="1"), "[general] more", "unknown key"),
        (general(edition="6"), "[general] edition", "this is edition 6"),
        (f"{HEAD}[torch]\nuniversal = true\nsrc = ['a.cpp']\n", "[torch] src", "compiles nothing"),
        (f"{HEAD}[torch]\npyroot = 'python'\n", "[torch] pyroot", "no such key"),
        ("general.name = 'a-b'\n", "[general]", "a header of its own"),
        ("[torch]\n", "[general]", "a header of its own"),
    ],
)
def test_what_cannot_be_of_edition_5_is_refused(home: Path, text: str, where: str, message: str) -> None:
    write(home, text)
    with pytest.raises(ConfigError) as caught:
        rewritten(home / "build.toml")
    assert str(caught.value.where).endswith(where)
    assert message in caught.value.message
    assert caught.value.hint
