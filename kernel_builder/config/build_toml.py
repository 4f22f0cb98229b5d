"""The format of `build.toml`, edition 5: every table, its keys and what each may hold.

This is about the text alone. `kernel_builder.project` looks at the files that it names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_builder.config import toml_schema
from kernel_builder.config.toml_schema import Key, TomlPlace
from kernel_builder.config.variant import BACKENDS, Release
from kernel_builder.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EDITION = 5
FILE = "build.toml"
NAME = r"[a-z][-a-z0-9]*[a-z0-9]"
REPO_ID = r"[A-Za-z0-9][-.\w]*/[A-Za-z0-9][-.\w]*"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")
# The longest real build.toml has some 30 kB; a parser should not be made to read anything that was never meant for it.
_MOST_BYTES = 1_000_000
# Python's parser takes memory by the square of a dotted key's parts. No key of the format has more than four.
_LONG_KEY = re.compile(r"""(?:\.[ \t]*(?:[\w-]{1,60}|"(?:[^"\\\n]|\\.){0,60}"|'[^'\n]{0,60}')[ \t]*){16}""")

# What a package may import besides the standard library and Torch: the public client refuses other names at load.
PYTHON_DEPENDS: Mapping[str, tuple[str, ...]] = {
    "general": ("einops", "helion", "tvm-ffi"),
    "cuda": ("nvidia-cutlass-dsl",),
    "neuron": ("nki",),
    "tpu": (),
    "xpu": ("onednn",),
}
_CUTLASS = ("2_10", "3_5", "3_6", "3_8", "3_9", "4_0", "4_4", "4_5")
KERNEL_DEPENDS = ("torch", *(f"cutlass_{version}" for version in _CUTLASS), "sycl_tla", "metal-cpp")


def _capability(value: Any, place: TomlPlace) -> str:
    from kernel_builder.config.matrix import known_capabilities

    known = known_capabilities()
    match = re.fullmatch(r"([0-9]+\.[0-9])[af]?(\+PTX)?", toml_schema.text(value, place))
    if not match or match[1] not in known:
        raise ConfigError(
            f"{value!r} is not a CUDA capability of any known toolkit",
            where=str(place),
            hint="choose from "
            + ", ".join(sorted(known, key=lambda text: [int(n) for n in re.findall(r"\d+", text)]))
            + '; `a` or `f` (as in "9.0a") and `+PTX` may follow',
        )
    return str(value)


def _stable_abi(value: Any, place: TomlPlace) -> Release | dict[str, Release]:
    """One version for all backends, or a table backend -> version."""
    if not isinstance(value, dict):
        return toml_schema.release(value, place)
    read = toml_schema.table({backend: Key(toml_schema.release) for backend in BACKENDS})
    return dict(read(value, place))


def _kernel_dependency(value: Any, place: TomlPlace) -> dict[str, Any]:
    read = toml_schema.table(
        {"repo-id": Key(_repo_id, required=True), "version": Key(toml_schema.natural), "revision": Key(_word)}
    )
    dependency = dict(read(value, place))
    if ("version" in dependency) == ("revision" in dependency):
        raise ConfigError(
            f"{dependency['repo_id']!r} needs either `version` or `revision`",
            where=str(place),
            hint=f'write {{ repo-id = "{dependency["repo_id"]}", version = 1 }}',
        )
    return dependency


def _kernel(value: Any, place: TomlPlace) -> dict[str, Any]:
    """A `[kernel.<name>]` table; its backend says which keys it may have."""
    name = _kernel_name(place.key, place.as_table())
    given = value.get("backend") if isinstance(value, dict) else None
    keys = _KERNEL | _KERNEL_OF.get(given, {}) if isinstance(given, str) else _KERNEL
    return {"name": name, **toml_schema.table(keys)(value, place)}


_name = toml_schema.matching(NAME, 'a name of small letters, digits and dashes like "my-kernel"')
_word = toml_schema.matching(r"\S+", "a name without spaces")
_repo_id = toml_schema.matching(REPO_ID, 'a repository\'s name like "org/my-kernel"')
_kernel_name = toml_schema.matching(r"[A-Za-z0-9_][-.\w]*", 'a kernel\'s name of letters, digits, "_", "-" and "."')
_host = r"(?:[A-Za-z0-9][-A-Za-z0-9]*\.)*[A-Za-z][-A-Za-z0-9]*"
_git_url = toml_schema.matching(
    rf"(?:(?:(?:git\+)?(?:https?|ssh)|git)://(?:[\w.-]+@)?{_host}(?::[0-9]{{1,4}})?/\S+|[\w.-]+@{_host}:[^\s:]+)",
    'the URL of a Git repository like "https://github.com/org/repo"',
)
_capabilities = toml_schema.list_of(_capability, least=1, hint="leave the key out to compile for every capability")
_texts = toml_schema.list_of(toml_schema.text)
_paths = toml_schema.list_of(toml_schema.inner_path)
_pyext = toml_schema.list_of(toml_schema.matching(r"[^\W_][\w.-]*", 'a file name\'s ending without its dot, like "py"'))
_backends = toml_schema.list_of(
    toml_schema.one_of(BACKENDS, "a backend"),
    least=1,
    hint='name the backends the kernel is for: backends = ["cpu", "cuda"]',
)
_kernel_depends = toml_schema.list_of(_kernel_dependency)


def _python_depends(backend: str | None) -> toml_schema.Reader:
    names = PYTHON_DEPENDS["general"] + (PYTHON_DEPENDS[backend] if backend else ())
    return toml_schema.list_of(toml_schema.one_of(names, "a Python package that a kernel may depend on"))


def _backend_table(backend: str, **keys: Key) -> Key:
    return Key(toml_schema.table({"python-depends": Key(_python_depends(backend)), **keys}))


_GENERAL = {
    "name": Key(_name, required=True),
    "version": Key(toml_schema.natural, required=True),
    "edition": Key(toml_schema.natural, required=True),
    "license": Key(toml_schema.matching(r".*\S.*", 'a licence\'s SPDX name like "apache-2.0"'), required=True),
    "backends": Key(_backends, required=True),
    "upstream": Key(_git_url),
    "source": Key(_git_url),
    "python-depends": Key(_python_depends(None)),
    "kernel-depends": Key(_kernel_depends),
    "hub": Key(toml_schema.table({"repo-id": Key(_repo_id), "branch": Key(_word)})),
    "cuda": _backend_table(
        "cuda",
        **{
            "minver": Key(toml_schema.release),
            "maxver": Key(toml_schema.release),
            "kernel-depends": Key(_kernel_depends),
        },
    ),
    "neuron": _backend_table("neuron", **{"kernel-depends": Key(_kernel_depends)}),
    "tpu": _backend_table("tpu"),
    "xpu": _backend_table("xpu", **{"kernel-depends": Key(_kernel_depends)}),
}
_TORCH = {
    "src": Key(_paths),
    "include": Key(_paths),
    "pyext": Key(_pyext),
    "cxx-flags": Key(_texts),
    "minver": Key(toml_schema.release),
    "maxver": Key(toml_schema.release),
    "stable-abi": Key(_stable_abi),
}
# The public parser spells these two with underscores, unlike the same keys of a kernel.
_TORCH_NOARCH = {"pyext": Key(_pyext), "cuda_capabilities": Key(_capabilities), "rocm_archs": Key(_texts)}
_TVM_FFI = {
    "src": Key(_paths, required=True),
    "include": Key(_paths),
    "pyext": Key(_pyext),
    "cxx-flags": Key(_texts),
}
_KERNEL_OF: Mapping[str, dict[str, Key]] = {
    "cpu": {},
    "cuda": {
        "cuda-capabilities": Key(_capabilities),
        "cuda-flags": Key(_texts),
        "cuda-minver": Key(toml_schema.release),
    },
    "metal": {},
    "rocm": {"rocm-archs": Key(_texts), "hip-flags": Key(_texts)},
    "xpu": {"sycl-flags": Key(_texts)},
}
_KERNEL = {
    "backend": Key(toml_schema.one_of(_KERNEL_OF, "a backend with compiled kernels"), required=True),
    "depends": Key(toml_schema.list_of(toml_schema.one_of(KERNEL_DEPENDS, "a dependency")), required=True),
    "src": Key(_paths, required=True),
    "include": Key(_paths),
    "cxx-flags": Key(_texts),
}
_DOCUMENT = {
    "general": Key(toml_schema.table(_GENERAL), required=True),
    "kernel": Key(toml_schema.tables(_kernel)),
    "torch": Key(toml_schema.table(_TORCH)),
    "torch-noarch": Key(toml_schema.table(_TORCH_NOARCH)),
    "tvm-ffi": Key(toml_schema.table(_TVM_FFI)),
}
# Table -> keys that only older editions have, and what stands in their place since.
_OLD_KEYS = {
    "torch": {
        "universal": "a `[torch-noarch]` table stands in its place",
        "name": "`name` is in `[general]` now",
        "pyroot": "the Python package is in torch-ext now",
    },
    "kernel": {"language": "`backend` stands in its place"},
}


def read(path: Path) -> dict[str, Any]:
    """The tables of the `build.toml` at `path`, validated, each by key with `_` for `-`.

    Versions are `Release`s, arrays are tuples, `kernel` maps names to tables, and everything else is as TOML has it.
    Keys that are left out are left out here. Paths are relative, but nothing says that they exist.

    Raises:
        ConfigError: If the file is missing, is not TOML, or is not what edition 5 allows.
    """
    return validate(_parse(path), str(path))


def validate(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What `read` gives, of a document that is parsed already; `where` names its file.

    Raises:
        ConfigError: If it is not what edition 5 allows.
    """
    place = TomlPlace(where)
    _require_edition(document, place)
    tables = dict(toml_schema.table(_DOCUMENT)(document, place))
    found = [name for name in FRAMEWORKS if name.replace("-", "_") in tables]
    if len(found) != 1:
        raise ConfigError(
            f"expected one framework table, got {' and '.join(f'[{name}]' for name in found) or 'none'}",
            where=str(place),
            hint="keep one of [torch] (compiled), [torch-noarch] (Python only) and [tvm-ffi] (compiled, without Torch)",
        )
    _check_range(tables.get("torch", {}), TomlPlace(where, "torch"))
    _check_range(tables["general"].get("cuda", {}), TomlPlace(where, "general.cuda"))
    return tables


def _parse(path: Path) -> dict[str, Any]:
    """The TOML document in `path`."""
    if not path.is_file():
        raise ConfigError(
            "there is no such file, so this is not a kernel project",
            where=str(path),
            hint="name the directory of a project, or make one: `kernel-builder init --name org/my-kernel`",
        )
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), hint="make it readable") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError("is larger than 1 MB", where=str(path), hint="write a build.toml by hand; it has a few kB")
    try:
        # A byte order mark is no part of TOML, but editors write it and the public parser takes it.
        document = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} is not UTF-8", where=str(path), hint="save the file in the encoding UTF-8"
        ) from error
    if found := _LONG_KEY.search(document):
        line = document.count("\n", 0, found.start()) + 1
        raise ConfigError(f"line {line} has a key of more than 16 parts", where=str(path), hint="shorten it")
    try:
        parsed: dict[str, Any] = tomllib.loads(document)
        return parsed
    except (ValueError, RecursionError) as error:
        words = "too many nested brackets" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"is not TOML: {words}", where=str(path), hint="mend the line it names") from error


def _require_edition(document: Mapping[str, Any], place: TomlPlace) -> None:
    """Refuse other editions by name: their keys would only be unknown keys otherwise."""
    general = document.get("general")
    if not isinstance(general, dict) or general.get("edition") == EDITION:
        return
    edition = general.get("edition")
    where = str(replace(place, table="general", key="edition"))
    if edition is None:
        old = dict(_old_keys(document))
        if not old:
            raise ConfigError("is missing; expected edition 5", where=where, hint="add `edition = 5` to [general]")
        raise ConfigError(
            f"is missing, and {', '.join(old)} is of an older edition; expected edition 5",
            where=where,
            hint="add `edition = 5`; " + "; ".join(f"for {key}, {now}" for key, now in old.items()),
        )
    if isinstance(edition, int) and not isinstance(edition, bool):
        older = edition < EDITION
        raise ConfigError(
            f"this is edition {edition}; expected edition 5",
            where=where,
            hint="rewrite the file by docs/build-toml.md, then set `edition = 5`"
            if older
            else "this builder does not know that edition; update it, or write edition 5",
        )


def _old_keys(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every key of the document that only older editions have, and what stands in its place."""
    kernels = document.get("kernel")
    tables = [("torch", "torch", document.get("torch"))]
    if isinstance(kernels, dict):
        tables += [("kernel", f"kernel.{name}", table) for name, table in kernels.items()]
    for kind, name, table in tables:
        if isinstance(table, dict):
            yield from ((f"`[{name}] {key}`", now) for key, now in _OLD_KEYS[kind].items() if key in table)


def _check_range(table: Mapping[str, Any], place: TomlPlace) -> None:
    low, high = table.get("minver"), table.get("maxver")
    if low and high and low > high:
        raise ConfigError(
            f"no version is at least {low} and at most {high}",
            where=str(place.at("minver")),
            hint="`minver` and `maxver` are both allowed versions; swap them, or leave one out",
        )
