"""The format of `build.toml`: its tables, their keys, and the values that each key takes.

The tables are those of edition 6; `editions` reads older files. `json_schema` describes the same tables for editors.

This module reads the text alone; `project_files` checks the files that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config import compiler_flags, editions, kernel_sources, known_backends, toml_schema
from kernel_builder.config.project import (
    Backend,
    Kernel,
    KernelDependency,
    Project,
    TorchFramework,
    TorchNoarch,
    TvmFfi,
)
from kernel_builder.config.toml_schema import Key, TomlPlace
from kernel_format.errors import ConfigError
from kernel_format.release import Release, Version

FILE = "build.toml"
RUST = "rust-cpu"
SCHEMA_URL = "https://raw.githubusercontent.com/kernels-community/kernel-builder/main/docs/build.schema.json"
NAME = r"[a-z][-a-z0-9]*[a-z0-9]"
REPO_ID = r"[A-Za-z0-9][-.\w]*/[A-Za-z0-9][-.\w]*"
# The longest build.toml on the Hub has 30 kB.
_MOST_BYTES = 1_000_000

# Packages that kernels of all backends may import besides the standard library and Torch. The public client refuses
# others at load.
PYTHON_DEPENDS = ("einops", "helion", "tvm-ffi")
_CUTLASS = ("2_10", "3_5", "3_6", "3_8", "3_9", "4_0", "4_4", "4_5")
KERNEL_DEPENDS = ("torch", *(f"cutlass_{version}" for version in _CUTLASS), "sycl_tla", "metal-cpp")


_RELEASE_SCHEMA = toml_schema.release.schema
_BACKEND_SCHEMA = {"enum": sorted(known_backends.NAMES)}


@toml_schema.with_schema(
    {
        "anyOf": [
            _RELEASE_SCHEMA,
            {"type": "object", "propertyNames": _BACKEND_SCHEMA, "additionalProperties": _RELEASE_SCHEMA},
        ]
    }
)
def _stable_abi(value: Any, place: TomlPlace) -> dict[str, Release]:
    """Read one version for all backends, which has the key "", or a table of backend -> version."""
    if not isinstance(value, dict):
        return {"": toml_schema.release(value, place)}
    keys = {backend: Key(toml_schema.release) for backend in known_backends.NAMES}
    return dict(toml_schema.table(keys)(value, place))


def _kernel_dependency(value: Any, place: TomlPlace) -> KernelDependency:
    dependency = KernelDependency(**toml_schema.table(_DEPENDENCY)(value, place))
    if (dependency.version is None) == (dependency.revision is None):
        raise ConfigError(
            f"{dependency.repo_id!r} needs either `version` or `revision`",
            where=str(place),
            hint=f'write {{ repo-id = "{dependency.repo_id}", version = 1 }}',
        )
    return dependency


def _kernel(value: Any, place: TomlPlace) -> Kernel:
    """Read a `[kernel.<name>]` table, whose language determines the keys that it may have."""
    name = _kernel_name(place.key, place.as_table())
    languages = _languages()
    table = value if isinstance(value, dict) else {}
    if "backend" in table:
        raise ConfigError(
            f"unknown key; edition {editions.EDITION} has `language` in its place",
            where=str(place.as_table().at("backend")),
            hint=f'write language = "cpp-{table["backend"]}"',
        )
    one_of = Key(toml_schema.one_of(languages, "the language of a kernel"), required=True)
    keys = _KERNEL
    if "language" in table:  # before the other keys, whose names depend on it
        _, keys = languages[one_of.read(table["language"], place.as_table().at("language"))]
    values: dict[str, Any] = toml_schema.table({**keys, "language": one_of})(value, place)
    backend, _ = languages[values.pop("language")]
    return Kernel(name, backend, **_with_includes(values))


def _languages() -> dict[str, tuple[Backend, dict[str, Key]]]:
    """Return language -> its backend, and the keys of a `[kernel.<name>]` table besides `language`."""
    every = known_backends.known()
    languages = {
        f"cpp-{backend.name}": (backend, {**_KERNEL, **backend.kernel_keys})
        for backend in every
        if backend.kernel_keys is not None
    }
    return {**languages, RUST: (known_backends.get("cpu"), _CRATE)}


def _with_includes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a table; the project's directories in its flags (`-I`) are moved to `include`."""
    for key in values.keys() & set(kernel_sources.FLAGS):
        values[key], directories = compiler_flags.split_includes(values[key])
        if directories:
            values["include"] = tuple(dict.fromkeys((*values.get("include", ()), *directories)))
    return values


def _torch(values: dict[str, Any]) -> TorchFramework:
    return TorchFramework(**_with_includes(values))


def _general(value: Any, place: TomlPlace) -> dict[str, Any]:
    """Read `[general]`, in which backends have tables."""
    tables = _general_tables()
    general: dict[str, Any] = toml_schema.table({**_GENERAL, **tables})(value, place)
    general["by_backend"] = {known_backends.get(name): general.pop(name) for name in tables if name in general}
    return general


def _general_tables() -> dict[str, Key]:
    """Return the tables of backends in `[general]`."""
    tables: dict[str, Key] = {}
    for backend in known_backends.known():
        if backend.python_depends is not None:
            depends = {"python-depends": Key(_python_depends(backend.python_depends)), **backend.general_keys}
            more = {"kernel-depends": Key(_kernel_depends)} if backend.kernel_depends else {}
            tables[backend.name] = Key(toml_schema.table({**depends, **more}))
    return tables


def _noarch(value: Any, place: TomlPlace) -> TorchNoarch:
    return TorchNoarch(**toml_schema.table(_noarch_keys())(value, place))


def _noarch_keys() -> dict[str, Key]:
    own = {name: key for backend in known_backends.known() for name, key in backend.noarch_keys.items()}
    return {"pyext": Key(_pyext), **own}


@toml_schema.with_schema({"type": "array", "minItems": 1, "items": _BACKEND_SCHEMA})
def _backends(value: Any, place: TomlPlace) -> tuple[Backend, ...]:
    one_of = toml_schema.one_of(known_backends.NAMES, "a backend")
    hint = 'name the backends the kernel is for: backends = ["cpu", "cuda"]'
    listed = dict.fromkeys(toml_schema.list_of(one_of, least=1, hint=hint)(value, place))
    return tuple(map(known_backends.get, listed))


# Names of files have at most 255 bytes, and those of binaries have thirty more than the project's.
_MOST_LETTERS = 200
_name = toml_schema.matching(
    rf"(?=.{{1,{_MOST_LETTERS}}}$){NAME}",
    f'a name of small letters, digits and dashes like "my-kernel", of 2 to {_MOST_LETTERS} letters',
)
_word = toml_schema.matching(r"\S+", "a name without spaces")
_repo_id = toml_schema.matching(REPO_ID, 'a repository\'s name like "org/my-kernel"')
_kernel_name = toml_schema.matching(r"[A-Za-z0-9_][-.\w]*", 'a kernel\'s name of letters, digits, "_", "-" and "."')
_host = r"(?:[A-Za-z0-9][-A-Za-z0-9]*\.)*[A-Za-z][-A-Za-z0-9]*"
_git_url = toml_schema.matching(
    rf"(?:(?:(?:git\+)?(?:https?|ssh)|git)://(?:[\w.-]+@)?{_host}(?::[0-9]{{1,4}})?/\S+|[\w.-]+@{_host}:[^\s:]+)",
    'the URL of a Git repository like "https://github.com/org/repo"',
)
_git_urls = toml_schema.list_of(_git_url)


@toml_schema.with_schema({"anyOf": [toml_schema.schema_of(_git_url), toml_schema.schema_of(_git_urls)]})
def _upstream(value: Any, place: TomlPlace) -> tuple[str, ...]:
    urls: tuple[str, ...] = _git_urls(value if isinstance(value, list) else [value], place)
    return urls


_texts = toml_schema.list_of(toml_schema.text)
_paths = toml_schema.list_of(toml_schema.inner_path)
_pyext = toml_schema.list_of(toml_schema.matching(r"[^\W_][\w.-]*", 'a file name\'s ending without its dot, like "py"'))
_DEPENDENCY = {"repo-id": Key(_repo_id, required=True), "version": Key(toml_schema.natural), "revision": Key(_word)}
_ONE_REVISION = {"oneOf": [{"required": ["version"]}, {"required": ["revision"]}]}
_kernel_depends = toml_schema.list_of(
    toml_schema.SchemaReader(_kernel_dependency, {**toml_schema.table_schema(_DEPENDENCY), **_ONE_REVISION})
)
_depend = toml_schema.one_of(KERNEL_DEPENDS, "a dependency")


def _python_depends(names: Sequence[str]) -> toml_schema.Reader:
    known = (*PYTHON_DEPENDS, *names)
    return toml_schema.list_of(toml_schema.one_of(known, "a Python package that a kernel may depend on"))


_GENERAL = {
    "name": Key(_name, required=True),
    "version": Key(toml_schema.natural, required=True),
    "edition": Key(toml_schema.SchemaReader(toml_schema.natural, {"const": editions.EDITION}), required=True),
    "license": Key(toml_schema.matching(r".*\S.*", 'a license\'s SPDX name like "apache-2.0"'), required=True),
    "backends": Key(_backends, required=True),
    "upstream": Key(_upstream),
    "source": Key(_git_url),
    "python-depends": Key(_python_depends(())),
    "kernel-depends": Key(_kernel_depends),
    "hub": Key(toml_schema.table({"repo-id": Key(_repo_id), "branch": Key(_word)})),
}
_TVM_FFI = {
    "src": Key(_paths),
    "include": Key(_paths),
    "pyext": Key(_pyext),
    "cxx-flags": Key(_texts),
}
_TORCH = {
    **_TVM_FFI,
    "minver": Key(toml_schema.version),
    "maxver": Key(toml_schema.version),
    "stable-abi": Key(_stable_abi),
}
_SOURCES = {"depends": Key(toml_schema.list_of(_depend), required=True), "src": Key(_paths, required=True)}
_KERNEL = {**_SOURCES, "include": Key(_paths), "cxx-flags": Key(_texts)}
_CRATE = {**_SOURCES, "cargo-manifest": Key(toml_schema.inner_path, required=True)}
# The schemas of tables whose keys depend on the backends are those of `json_schema`.
_DOCUMENT = {
    "general": Key(_general, required=True),
    "kernel": Key(toml_schema.tables(_kernel)),
    TorchFramework.table: Key(toml_schema.table(_TORCH, _torch)),
    TorchNoarch.table: Key(_noarch),
    TvmFfi.table: Key(toml_schema.table(_TVM_FFI, lambda values: TvmFfi(**values))),
}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a `build.toml` for the backends of the builder."""
    languages = _languages()
    by_language = [
        {
            "if": {"properties": {"language": {"const": name}}, "required": ["language"]},
            "then": toml_schema.table_schema({"language": Key(toml_schema.text), **keys}),
        }
        for name, (_, keys) in languages.items()
    ]
    kernel = {
        "type": "object",
        "properties": {"language": {"enum": list(languages)}},
        "required": ["language", *_SOURCES],
    }
    document = toml_schema.table_schema(_DOCUMENT)
    document["properties"] |= {
        "general": toml_schema.table_schema({**_GENERAL, **_general_tables()}),
        "kernel": {"type": "object", "additionalProperties": {**kernel, "allOf": by_language}},
        TorchNoarch.table: toml_schema.table_schema(_noarch_keys()),
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": SCHEMA_URL, "title": "build.toml"}
    return {**head, **document, "oneOf": [{"required": [name]} for name in editions.FRAMEWORKS]}


def read(path: Path, root: Path) -> Project:
    """Read the `build.toml` at `path` as a project in `root`, without its Python files.

    Paths in the project are relative, but need not exist.
    """
    return from_document(toml_file.parse(read_text(path), str(path)), str(path), root)


def from_document(document: Mapping[str, Any], where: str, root: Path) -> Project:
    """Return the project that a parsed `build.toml` describes.

    Args:
        where: The file name for errors.
        root: The directory of the project, without symbolic links.
    """
    place = TomlPlace(where)
    document, warnings = editions.as_current(document, place)
    tables = toml_schema.table(_DOCUMENT)(document, place)
    frameworks = [table for table in tables.values() if isinstance(table, (TorchFramework, TorchNoarch, TvmFfi))]
    if len(frameworks) != 1:
        given = " and ".join(f"[{name}]" for name in sorted(framework.table for framework in frameworks))
        raise ConfigError(
            f"expected one framework table, got {given or 'none'}",
            where=str(place),
            hint="keep one of [torch] (compiled), [torch-noarch] (Python only) and [tvm-ffi] (compiled, without Torch)",
        )
    general, framework = tables["general"], frameworks[0]
    general.pop("edition")
    hub = general.pop("hub", {})
    by_backend = general.pop("by_backend")
    if isinstance(framework, TorchFramework):
        _check_range(framework.minver, framework.maxver, TomlPlace(where, framework.table))
        since: Mapping[Any, Release] = framework.stable_abi  # by name, as `_stable_abi` reads it
        floors = {backend: since.get(backend.name, since.get("")) for backend in general["backends"]}
        stable_abi = {backend: floor for backend, floor in floors.items() if floor}
        framework = replace(framework, stable_abi=stable_abi)
    kernels = tuple(tables.get("kernel", {}).values())
    rust = next((kernel for kernel in kernels if kernel.cargo_manifest), None)
    if rust and not isinstance(framework, TvmFfi):
        raise ConfigError(
            f"{RUST!r} needs the framework [tvm-ffi], and this project has [{framework.table}]",
            where=str(TomlPlace(where, f"kernel.{rust.name}", "language")),
            hint="export the crate's functions for TVM FFI, and write [tvm-ffi] in place of the table",
        )
    for backend, settings in by_backend.items():
        _check_range(settings.get("minver"), settings.get("maxver"), TomlPlace(where, f"general.{backend}"))
    return Project(
        root=root,
        framework=framework,
        kernels=kernels,
        warnings=(*warnings, *kernel_sources.warnings(framework, kernels, general["backends"])),
        backend_python_depends=_of_backends(by_backend, "python_depends"),
        backend_kernel_depends=_of_backends(by_backend, "kernel_depends"),
        backend_settings={
            backend: own
            for backend, settings in by_backend.items()
            if (own := {key: value for key, value in settings.items() if not key.endswith("_depends")})
        },
        hub_repo_id=hub.get("repo_id"),
        hub_branch=hub.get("branch"),
        **general,
    )


def _of_backends(by_backend: Mapping[Backend, Mapping[str, Any]], key: str) -> dict[Backend, Any]:
    return {backend: table[key] for backend, table in by_backend.items() if table.get(key)}


def read_text(path: Path) -> str:
    """Return the text of the `build.toml` at `path`, without a byte order mark."""
    if path.parent.is_file():
        raise ConfigError(
            "is a file, and a project is a directory with a build.toml",
            where=str(path.parent),
            hint="name the directory, or stay in it and give none",
        )
    if not path.is_file():
        raise ConfigError(
            "there is no such file, so this is not a kernel project",
            where=str(path),
            hint="name the directory of a project, or create one: `kernel-builder init org/my-kernel`",
        )
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), hint="make it readable") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(
            "is larger than 1 MB", where=str(path), hint="check that this is a build.toml; those have a few kB"
        )
    return toml_file.decode(content, str(path))


def _check_range(low: Version | None, high: Version | None, place: TomlPlace) -> None:
    if low and high and low > high:
        raise ConfigError(
            f"no version is at least {low} and at most {high}",
            where=str(place.at("minver")),
            hint="`minver` and `maxver` both include the version they name; swap them, or leave one out",
        )
