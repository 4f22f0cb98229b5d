"""Files that only our reader of build.toml rejects, by reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    framework,
    general,
    kernel,
    more,
    ours,
    theirs,
    torch,
    write,
)

# Reason -> (the text of our error, files that we reject for this reason and the public parser accepts).
STRICTER: dict[str, tuple[str, list[str]]] = {
    "a missing file": (
        r"there is no (file|directory) ",
        [
            torch('src = ["no.cpp"]'),
            torch('include = ["a.cpp"]'),
            kernel("cpu", src='["no.cpp"]'),
            kernel("cpu", src=f'["{"a" * 5000}"]'),
        ],
    ),
    "a path outside the project": (
        r"is not a path inside the project",
        [
            *(torch(f'src = ["{path}"]') for path in ("../a.cpp", "/etc/passwd", "inc/../a.cpp", "")),
            torch('include = ["/usr/include"]'),
            kernel("cpu", src='["../a.cpp"]'),
            torch('src = ["a\\nb.cpp"]'),
        ],
    ),
    "no backends": (r"is an empty array", [general(backends="[]")]),
    "a backend with device code that no kernel has": (
        r"lists (cuda|rocm), and no \[kernel.<name>\] is for it",
        [
            general().replace(CUDA, ""),
            torch('stable-abi = {rocm = "2.10"}').replace('"cuda"]', '"cuda", "rocm"]'),
            framework('[tvm-ffi]\nsrc = ["a.cpp"]').replace(CUDA, ""),
        ],
    ),
    "no capabilities": (r"is an empty array", [kernel("cuda", "cuda-capabilities = []")]),
    "a text that is not a capability": (
        r"is not a CUDA capability",
        [
            *(kernel("cuda", f'cuda-capabilities = ["{c}"]') for c in ("sm_90", "9.0x", "9.0+ptx", "")),
            framework('[torch-noarch]\ncuda_capabilities = ["9"]'),
        ],
    ),
    "an empty version range": (
        r"no version is at least",
        [torch('minver = "2.10"\nmaxver = "2.9"'), more('[general.cuda]\nminver = "13.0"\nmaxver = "12.8"\n')],
    ),
    "a version that only a number parser reads": (
        r"is not a version like",
        [torch(f'minver = "{v}"') for v in (" 2.8", "+2.8", "1844674407370955161.0")],
    ),
    "a Python package that the client refuses": (
        r"is not a Python package that a kernel may depend on",
        [
            general(python_depends='["numpy"]'),
            more('[general.cuda]\npython-depends = ["nki"]\n'),
        ],
    ),
    "a repository without an owner": (
        r"is not a repository's name",
        [
            more('[general.hub]\nrepo-id = "k"\n'),
            general(kernel_depends='[{repo-id = "k", version = 1}]'),
        ],
    ),
    "an empty name": (
        r"is not a name without spaces|is not a license",
        [
            general(license='""'),
            more('[general.hub]\nbranch = ""\n'),
            general(kernel_depends='[{repo-id = "o/k", revision = ""}]'),
        ],
    ),
    "a kernel name that is not a file name": (
        r"is not a kernel's name",
        [kernel("cpu", name=f'"{name}"') for name in ("", "../x", "é", "-x")],
    ),
    "a file extension that no file can have": (
        r"is not a file name's ending",
        [torch(f'pyext = ["py", "{ending}"]') for ending in (".py", "a/b")],
    ),
    "a package without its __init__.py": (
        r"expected the Python package",
        [torch("pyext = []"), general(name='"no-package"')],
    ),
    "a Git URL that few tools accept": (
        r"is not the URL of a Git repository",
        [
            general(source=f'"{url}"')
            for url in (
                "https://github.com",
                "https://github.com/o r",
                "https://[::1]/r",
                "https://user:pw@github.com/o/r",
            )
        ],
    ),
    "a key of too many parts": (r"has a key of more than 16 parts", [more(f"# {'.a' * 400_000}")]),
    "a file of more than 1 MB": (r"is larger than 1 MB", [more("#" * 1_000_001)]),
    # The public parser's library also accepts an array for a table and a table for a string. The format has neither.
    "an array in place of a table": (
        r"expected a table, got an array",
        [
            general(hub='["o/k", "v1"]'),
            'kernel.x = ["cpu", [], [], [], []]\n' + general().replace(CPU + CUDA, ""),
        ],
    ),
    "a table in place of a string": (r"expected a string, got a table", [kernel("cpu", depends="[{torch = {}}]")]),
}


@pytest.mark.parametrize(
    ("message", "text"),
    [pytest.param(message, text, id=reason) for reason, (message, texts) in STRICTER.items() for text in texts],
)
def test_only_our_reader_rejects(home: Path, message: str, text: str) -> None:
    write(home, text)
    assert theirs(home) is not None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert re.search(message, error.message), error.message
    assert error.where
    assert error.where.startswith(str(home))
    assert error.hint
