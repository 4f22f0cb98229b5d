"""Compares our reader of build.toml with the public parser: both accept the same files, except for listed reasons.

We reject every file that the public parser rejects. Files that it accepts we accept too, or reject for a reason that
`STRICTER` lists. `test_mutations` compares both on randomly changed files.
"""

from __future__ import annotations

import copy
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels._rust import Backend, Build, KernelVersion

from kernel_builder.config import build_toml, project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import BACKENDS
from kernel_builder.errors import ConfigError

GENERAL = {
    "name": '"a-b"',
    "version": "1",
    "edition": "5",
    "license": '"apache-2.0"',
    "backends": '["cpu", "cuda"]',
}
TORCH = '[torch]\nsrc = ["torch-ext/binding.cpp"]\n'
CPU = '[kernel.c]\nbackend = "cpu"\ndepends = ["torch"]\nsrc = ["a.cpp"]\n'
CUDA = '[kernel.g]\nbackend = "cuda"\ndepends = ["torch"]\nsrc = ["a.cu"]\n'
DEPENDENCY = '{repo-id = "o/k", version = 1}'


def general(**changes: str | None) -> str:
    """A complete file with these keys of [general] changed, or removed if None. `_` stands for `-`."""
    keys = {**GENERAL, **{key.replace("_", "-"): value for key, value in changes.items()}}
    lines = "".join(f"{key} = {value}\n" for key, value in keys.items() if value is not None)
    return f"[general]\n{lines}{TORCH}{CPU}{CUDA}"


def framework(text: str) -> str:
    """A complete file with `text` in place of [torch]."""
    return general().replace(TORCH, text + "\n")


def torch(line: str) -> str:
    return framework(f"[torch]\n{line}")


def kernel(backend: str, *lines: str, depends: str = '["torch"]', src: str = '["a.cpp"]', name: str = "x") -> str:
    """A complete file with one more kernel."""
    more = "\n".join(lines)
    return f'{general()}[kernel.{name}]\nbackend = "{backend}"\ndepends = {depends}\nsrc = {src}\n{more}\n'


def more(text: str) -> str:
    """A complete file followed by `text`."""
    return general() + text


ACCEPTED = [
    *(general(name=f'"{name}"') for name in ("ab", "a1", "a--b", "a-" + "b" * 40)),
    *(general(version=version) for version in ("0", "0x10", "1_0", "9223372036854775807")),
    *(general(license=text) for text in ('"Apache-2.0"', '"proprietary"', '"""mit"""', "'mit'")),
    *(general(backends=f'["{backend}"]') for backend in BACKENDS),
    general(backends='["cuda", "cuda", "cpu"]'),
    general(backends='["cpu"]'),  # [kernel.g] is for another backend
    *(
        general(source=f'"{url}"')
        for url in (
            "https://github.com/o/r",
            "http://github.com/o/r.git",
            "https://user@github.com/o/r",
            "https://git.example.org:8080/o/r",
            "ssh://git@github.com/o/r",
            "git://github.com/o/r",
            "git+ssh://git@github.com/o/r",
            "git+https://github.com/o/r",
            "git@github.com:o/r.git",
        )
    ),
    general(upstream='"https://github.com/o/r"'),
    general(python_depends="[]"),
    general(python_depends='["einops", "helion", "tvm-ffi"]'),
    general(kernel_depends="[]"),
    general(kernel_depends=f"[{DEPENDENCY}]"),
    general(kernel_depends='[{repo-id = "o/k", revision = "main"}]'),
    general(hub="{}"),
    more('[general.hub]\nrepo-id = "o/k"\nbranch = "v1"\n'),
    more('[general.cuda]\nminver = "12.6"\nmaxver = "13.2"\npython-depends = ["nvidia-cutlass-dsl"]\n'),
    more('[general.cuda]\nminver = "13.0"\nmaxver = "13.0"\n'),
    *(more(f"[general.{b}]\nkernel-depends = [{DEPENDENCY}]\n") for b in ("cuda", "neuron", "xpu")),
    more('[general.neuron]\npython-depends = ["nki"]\n'),
    more('[general.xpu]\npython-depends = ["onednn", "einops"]\n'),
    more("[general.tpu]\n"),
    general(backends='["cpu"]') + '[general.cuda]\nminver = "12.0"\n',
    framework("[torch]"),
    torch("src = []"),
    torch('include = [".", "inc"]'),
    torch('minver = "2.10"\nmaxver = "2.15"'),
    torch('minver = "02.08"'),
    torch('pyext = ["py", "json", "pyi"]'),
    torch('cxx-flags = ["-O2", ""]'),
    torch('stable-abi = "2.10"'),
    torch('stable-abi = {cpu = "2.9", cuda = "2.10"}'),
    torch('stable-abi = {rocm = "2.10"}'),
    torch("stable-abi = {}"),
    torch('[torch.stable-abi]\ncuda = "2.10"'),
    torch('stable-abi.cuda = "2.10"'),
    framework("[torch-noarch]"),
    framework('[torch-noarch]\npyext = ["py"]\ncuda_capabilities = ["9.0"]\nrocm_archs = ["gfx90a"]'),
    framework('[tvm-ffi]\nsrc = ["a.cpp"]\ninclude = ["."]\npyext = ["py"]\ncxx-flags = ["-O2"]'),
    general().replace(CPU + CUDA, ""),
    general().replace(CPU + CUDA, "[kernel]\n"),
    *(kernel(backend) for backend in ("cpu", "cuda", "metal", "rocm", "xpu")),
    *(kernel(b, 'include = ["inc"]', 'cxx-flags = ["-g"]') for b in ("cpu", "cuda", "metal", "rocm", "xpu")),
    kernel("cuda", 'cuda-capabilities = ["8.0", "9.0a", "10.0f", "12.0+PTX", "9.0a+PTX"]'),
    kernel("cuda", 'cuda-flags = ["-lineinfo"]', 'cuda-minver = "12.8"'),
    kernel("rocm", 'rocm-archs = ["gfx942"]', 'hip-flags = ["-O2"]'),
    kernel("xpu", 'sycl-flags = ["-O2"]'),
    *(kernel("cpu", depends=f'["{name}"]') for name in build_toml.KERNEL_DEPENDS),
    kernel("cpu", depends="[]", src="[]"),
    kernel("cpu", depends='["torch", "torch"]', src='["a.cpp", "inc/a.h"]'),
    *(kernel("cpu", name=name) for name in ("1", "_x", "A-b", '"a.b"', "torch")),
    general().replace("\n", "\r\n"),
    "\ufeff" + general(),
    "torch.src = []\n" + framework(""),
    'kernel.z = {backend = "cpu", depends = [], src = ["a.cpp"]}\n' + general().replace(CPU + CUDA, ""),
]

REJECTED = [
    *(general(**{key: None}) for key in ("name", "version", "license", "backends")),
    *(general(name=f'"{name}"') for name in ("", "a", "1a", "A-b", "a_b", "a-", "-a", "a.b", "é", "../ab", "ab\\n")),
    *(general(version=v) for v in ("-1", "1.0", '"1"', "true", "9223372036854775808", "[1]")),
    *(general(edition=v) for v in ("0", "1", "2", "3", "4", "6", "255", '"5"', "5.0", "-1", "true")),
    *(general(license=v) for v in ("1", '["mit"]', "2020-01-01", "07:32:00", "{}")),
    *(general(backends=v) for v in ('"cuda"', '["CUDA"]', '["npu"]', "[1]", '[["cuda"]]', "[{cuda = 1}]")),
    *(
        general(source=f'"{url}"')
        for url in (
            "",
            "o/r",
            "./r",
            "/o/r",
            "github.com/o/r",
            "file:///o/r",
            "ftp://h/o",
            "https://",
            "h:r",
            "hf://o/r",
        )
    ),
    general(source='"https://github.com:99999/o/r"'),
    general(source="1"),
    general(upstream='"x"'),
    general(python_depends='"einops"'),
    general(python_depends="[1]"),
    *(
        general(kernel_depends=f"[{item}]")
        for item in (
            '"o/k"',
            '{repo-id = "o/k"}',
            "{version = 1}",
            '{repo-id = "o/k", version = 1, revision = "main"}',
            '{repo-id = "o/k", version = "1"}',
            '{repo-id = "o/k", version = -1}',
            '{repo-id = "o/k", revision = 1}',
            '{repo_id = "o/k", version = 1}',
            '{repo-id = "o/k", version = 1, more = 1}',
        )
    ),
    *(general(**{key: '"x"'}) for key in ("description", "python_version", "hub", "cuda", "universal")),
    *(more(f"[general.hub]\n{line}\n") for line in ('repo_id = "o/k"', "branch = 1", "more = 1")),
    *(more(f"[general.{backend}]\n") for backend in ("cann", "cpu", "metal", "rocm")),
    more('[general.xpu]\nminver = "1.0"\n'),
    more(f"[general.tpu]\nkernel-depends = [{DEPENDENCY}]\n"),
    *(more(f"[general.cuda]\nminver = {v}\n") for v in ("13.0", '"13"', '"13.0.1"', '"x"', '""', '"13."', '"1３.0"')),
    *(more(f"{table}\n") for table in ("[test]", "[kernels.x]", "[torch-noarch]", "[tvm-ffi]", "[[torch]]")),
    "more = 1\n" + general(),
    framework(""),
    framework("[[torch]]\nsrc = []"),
    framework("[Torch]"),
    framework("[tvm-ffi]"),
    *(
        framework(f'[tvm-ffi]\nsrc = ["a.cpp"]\n{line}')
        for line in ('minver = "2.8"', 'stable-abi = "2.10"', "more = 1")
    ),
    *(
        framework(f"[torch-noarch]\n{line}")
        for line in (
            'cuda-capabilities = ["9.0"]',
            'rocm-archs = ["gfx90a"]',
            'src = ["a.cpp"]',
            'minver = "2.8"',
            "cuda_capabilities = [9.0]",
            'pyext = "py"',
        )
    ),
    *(
        torch(line)
        for line in (
            'src = "a.cpp"',
            "src = [1]",
            'include = "."',
            "minver = 2.8",
            'minver = "2"',
            'maxver = "2.8.1"',
            'maxver = "v2.8"',
            'pyext = "py"',
            "pyext = [1]",
            'cxx-flags = "-O2"',
            'cxx_flags = ["-O2"]',
            'stable_abi = "2.10"',
            "stable-abi = 2.10",
            "stable-abi = true",
            'stable-abi = "2"',
            'stable-abi = "2.10.0"',
            'stable-abi = ["2.10"]',
            'stable-abi = {gpu = "2.10"}',
            "stable-abi = {cuda = 2}",
            "universal = true",
            "more = 1",
        )
    ),
    *(kernel(backend) for backend in ("cann", "neuron", "tpu", "CUDA", "gpu", "")),
    general().replace('backend = "cpu"\n', ""),
    general().replace('backend = "cpu"', "backend = 1"),
    general().replace('depends = ["torch"]\n', "", 1),
    general().replace('src = ["a.cpp"]\n', ""),
    *(
        kernel(backend, line)
        for backend, line in (
            ("cpu", 'cuda-flags = ["-g"]'),
            ("cpu", 'cuda-capabilities = ["9.0"]'),
            ("cuda", 'hip-flags = ["-g"]'),
            ("cuda", 'rocm-archs = ["gfx942"]'),
            ("cuda", 'cuda_flags = ["-g"]'),
            ("cuda", 'language = "cuda"'),
            ("cuda", 'cuda-minver = "13"'),
            ("cuda", "cuda-minver = 13.0"),
            ("cuda", 'cuda-capabilities = "9.0"'),
            ("cuda", "cuda-capabilities = [9.0]"),
            ("cuda", 'cuda-flags = "-g"'),
            ("metal", 'sycl-flags = ["-g"]'),
            ("rocm", 'sycl-flags = ["-g"]'),
            ("xpu", 'hip-flags = ["-g"]'),
            ("cpu", "[kernel.x.more]"),
        )
    ),
    *(kernel("cpu", depends=v) for v in ('["cutlass_3_7"]', '["Torch"]', '"torch"', "[1]", '[["torch"]]')),
    *(kernel("cpu", src=v) for v in ('"a.cpp"', "[1]", "{}")),
    "kernel = 1\n" + general().replace(CPU + CUDA, ""),
    general().replace(CPU + CUDA, "[kernel]\nx = 1\n"),
    general().replace(CPU + CUDA, "[[kernel]]\n"),
    torch("universal = true").replace("edition = 5\n", ""),
    general(edition=None, version=None),
    "",
    "general = 1\n",
    "[general\n",
    more("[general]\n"),
    general() + 'backend = "cpu"\n',
    general(license='"a\\e"'),
    general(license='"\\ud800"'),
    general().replace("\n", "\r"),
    more("# \0\n"),
    more("[kernel.é]\n"),
    "a" + ".a" * 450_000 + " = 1",
    "x = {" + """.'"' . "\\"" """ * 50_000 + " = 1}",
    "x = " + "[" * 5000 + "]" * 5000 + "\n" + general(),
]

# Reason -> (the text of our error, files that we reject for this reason and the public parser accepts).
STRICTER: dict[str, tuple[str, list[str]]] = {
    "a file that the builder would miss": (
        r"there is no (file|directory) ",
        [
            torch('src = ["no.cpp"]'),
            torch('src = ["inc"]'),
            torch('include = ["no"]'),
            torch('include = ["a.cpp"]'),
            kernel("cpu", src='["no.cpp"]'),
            kernel("cpu", 'include = ["no"]'),
            kernel("cpu", src=f'["{"a" * 5000}"]'),
        ],
    ),
    "a path out of the project": (
        r"is not a path inside the project",
        [
            *(torch(f'src = ["{path}"]') for path in ("../a.cpp", "/etc/passwd", "inc/../a.cpp", "")),
            *(torch(f'include = ["{path}"]') for path in ("..", "/usr/include")),
            *(kernel("cpu", src=f'["{path}"]') for path in ("../a.cpp", "/a.cpp")),
        ],
    ),
    "a path that no build file can hold": (r"has a control character", [torch('src = ["a\\nb.cpp"]')]),
    "a file that would be linked twice": (
        r"is named twice",
        [torch('src = ["a.cpp", "a.cpp"]'), kernel("cpu", src='["a.cpp", "./a.cpp"]')],
    ),
    "an older edition": (
        r"is missing.*expected edition 5",
        [
            general(edition=None),
            general(edition=None).replace('backend = "cpu"', 'backend = "cpu"\ninclude = ["."]'),
        ],
    ),
    "a project for no backend": (r"is an empty array", [general(backends="[]")]),
    "a kernel for no capability": (r"is an empty array", [kernel("cuda", "cuda-capabilities = []")]),
    "a capability that no toolkit has": (
        r"is not a CUDA capability",
        [
            *(
                kernel("cuda", f'cuda-capabilities = ["{c}"]')
                for c in ("99.0", "9", "sm_90", "9.0x", "9.0+ptx", "9.0 ", "")
            ),
            framework('[torch-noarch]\ncuda_capabilities = ["1.0"]'),
        ],
    ),
    "a range without a version": (
        r"no version is at least",
        [torch('minver = "2.10"\nmaxver = "2.9"'), more('[general.cuda]\nminver = "13.0"\nmaxver = "12.8"\n')],
    ),
    "a version that only a number parser reads": (
        r"is not a version of two numbers",
        [torch(f'minver = "{v}"') for v in (" 2.8", "2.8 ", "+2.8", "2.+8", "18446744073709551615.0")],
    ),
    "a Python package that the client refuses": (
        r"is not a Python package that a kernel may depend on",
        [
            general(python_depends='["numpy"]'),
            general(python_depends='["nki"]'),
            more('[general.cuda]\npython-depends = ["nki"]\n'),
            more('[general.tpu]\npython-depends = ["jax"]\n'),
        ],
    ),
    "a repository without an owner": (
        r"is not a repository's name",
        [
            more('[general.hub]\nrepo-id = "k"\n'),
            general(kernel_depends='[{repo-id = "k", version = 1}]'),
            general(kernel_depends='[{repo-id = "", version = 1}]'),
        ],
    ),
    "an empty name": (
        r"is not a name without spaces|is not a licence",
        [
            general(license='""'),
            more('[general.hub]\nbranch = ""\n'),
            general(kernel_depends='[{repo-id = "o/k", revision = ""}]'),
        ],
    ),
    "a kernel's name that is no file name": (
        r"is not a kernel's name",
        [kernel("cpu", name=f'"{name}"') for name in ("", "../x", "a/b", "a b", "é", "-x")],
    ),
    "an ending that no file has": (
        r"is not a file name's ending",
        [torch(f'pyext = ["py", "{ending}"]') for ending in (".py", "", "a/b", "*")],
    ),
    "a package without its __init__.py": (
        r"expected the Python package",
        [torch('pyext = ["json"]'), torch("pyext = []"), general(name='"no-package"')],
    ),
    "a Git URL that few tools take": (
        r"is not the URL of a Git repository",
        [
            general(source=f'"{url}"')
            for url in (
                "https://github.com",
                "https:///x",
                "https://github.com/o r",
                " https://github.com/o/r",
                "https://[::1]/r",
                "https://é.fr/r",
                "HTTPS://github.com/o/r",
                "https://user:pw@github.com/o/r",
                "@h:r",
            )
        ],
    ),
    "a key that would take the parser all memory": (r"has a key of more than 16 parts", [more(f"# {'.a' * 400_000}")]),
    "a file of more than 1 MB": (r"is larger than 1 MB", [more("#" * 1_000_001)]),
    # The public parser's library also accepts a table's fields as an array, and a table for a string: not the format.
    "an array where a table belongs": (
        r"expected a table, got an array",
        [
            general(hub='["o/k", "v1"]'),
            general(xpu="[[], []]"),
            'torch = [[], "2.8", "2.9", [], [], "2.10", []]\n' + framework(""),
            'kernel.x = ["cpu", [], [], [], []]\n' + general().replace(CPU + CUDA, ""),
        ],
    ),
    "a table where a word belongs": (r"expected a string, got a table", [kernel("cpu", depends="[{torch = {}}]")]),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project directory with every file that the cases name."""
    home = tmp_path_factory.mktemp("project")
    names = [match[1] for text in ACCEPTED if (match := re.search(r'^name = "(.*)"', text, re.MULTILINE))]
    packages = [f"torch-ext/{project.python_name(name)}" for name in names] + ["tvm-ffi-ext/a_b"]
    files = ["a.cpp", "a.cu", "inc/a.h", "torch-ext/binding.cpp", *(f"{package}/__init__.py" for package in packages)]
    for file in files:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    return home


def theirs(home: Path) -> Build | None:
    """The project as the public parser reads it, or None if it rejects the file."""
    try:
        return Build.open(home)
    except ValueError:
        return None


def ours(home: Path) -> project.Project | ConfigError:
    try:
        return read_project(home)
    except ConfigError as error:
        return error


def write(home: Path, text: str) -> None:
    (home / build_toml.FILE).write_bytes(text.encode())


def assert_same_values(home: Path) -> None:
    """Assert that we read the same values as the public parser, as far as it exposes them."""
    build, mine = theirs(home), ours(home)
    assert build is not None
    assert isinstance(mine, project.Project), str(mine)
    assert list(mine.backends) == list(dict.fromkeys(str(backend) for backend in build.general.backends))
    for backend in BACKENDS:
        expected = [
            (
                dependency.repo_id,
                dependency.version.version if isinstance(dependency.version, KernelVersion.Version) else None,
                dependency.version.revision if isinstance(dependency.version, KernelVersion.Revision) else None,
            )
            for dependency in build.all_kernel_depends(Backend.from_str(backend))
        ]
        found = (*mine.kernel_depends, *mine.backend_kernel_depends.get(backend, ()))
        assert [(d.repo_id, d.version, d.revision) for d in found] == expected


@pytest.mark.parametrize("text", ACCEPTED)
def test_both_accept(home: Path, text: str) -> None:
    write(home, text)
    assert_same_values(home)


@pytest.mark.parametrize("text", REJECTED)
def test_both_reject(home: Path, text: str) -> None:
    write(home, text)
    assert theirs(home) is None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert error.where
    assert error.where.startswith(str(home / build_toml.FILE))
    assert error.hint


@pytest.mark.parametrize(
    ("says", "text"),
    [pytest.param(says, text, id=reason) for reason, (says, texts) in STRICTER.items() for text in texts],
)
def test_only_we_reject(home: Path, says: str, text: str) -> None:
    write(home, text)
    assert theirs(home) is not None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert re.search(says, error.message), error.message
    assert error.where
    assert error.where.startswith(str(home))
    assert error.hint


def test_python_dependencies_are_the_clients() -> None:
    known = json.loads((resources.files("kernels") / "python_depends.json").read_text())
    mine = {key: set(names) for key, names in build_toml.PYTHON_DEPENDS.items() if names}
    assert mine.pop("general") == set(known["general"])
    assert mine == {backend: set(names) for backend, names in known["backends"].items() if names}


# Valid files that `mutations` changes.
SEEDS: list[dict[str, Any]] = [
    build_toml.tomllib.loads(text)
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
    """A valid document with one to three changes: a key deleted, renamed or added, a value replaced or repeated."""
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


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_mutations(home: Path, document: dict[str, Any]) -> None:
    write(home, "".join(f"{json.dumps(key)} = {dump(value)}\n" for key, value in document.items()))
    build, mine = theirs(home), ours(home)
    if build is None:
        assert isinstance(mine, ConfigError)
    elif isinstance(mine, ConfigError):
        assert any(re.search(says, mine.message) for says, _ in STRICTER.values()), str(mine)
    else:
        assert_same_values(home)
