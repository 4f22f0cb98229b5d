"""The format of `build.toml`: its tables as values of `project`.

`build.schema.json` has the tables of edition 6, their keys, and the values that each key takes; editors read it too.
`editions` reads older files. This module reads the text alone; `project_files` checks the files that it names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config import compiler_flags, editions, kernel_sources, known_backends, matrix
from kernel_builder.config.project import (
    Backend,
    Kernel,
    KernelDependency,
    Project,
    TorchFramework,
    TorchNoarch,
    TvmFfi,
    python_name,
)
from kernel_builder.config.toml_schema import SchemaReader, TomlPlace
from kernel_format.errors import ConfigError
from kernel_format.release import Release, Version

FILE = "build.toml"
# The longest build.toml on the Hub has 30 kB.
_MOST_BYTES = 1_000_000

SCHEMA: Mapping[str, Any] = json.loads(Path(__file__).with_name("build.schema.json").read_text())
_READER = SchemaReader(SCHEMA["definitions"], "docs/build-toml.md")
NAME: str = SCHEMA["definitions"]["name"]["pattern"]
REPO_ID: str = SCHEMA["definitions"]["repo-id"]["pattern"]
# Packages that kernels of all backends may import besides the standard library and Torch. The public client refuses
# others at load.
PYTHON_DEPENDS = tuple(SCHEMA["definitions"]["python-depends"]["items"]["enum"])

# Modules of the packages that a kernel is built and loaded with.
_MODULES = {
    *("cuda", "huggingface_hub", "jax", "kernels", "nvidia", "numpy", "packaging", "pip", "pytest", "scipy"),
    *("setuptools", "torch", "torchaudio", "torchvision", "transformers", "triton", "wheel", "yaml"),
    *map(python_name, PYTHON_DEPENDS),
}


def inner_path(value: Any, place: TomlPlace) -> str:
    """Read a relative path without `..`. Return it without a leading `./`."""
    return str(_READER.read(value, SCHEMA["definitions"]["path"], place))


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
    document, warnings = editions.as_current(document, TomlPlace(where))
    tables = _READER.read(document, SCHEMA, TomlPlace(where))
    general = tables["general"]
    check_name(general["name"], str(TomlPlace(where, "general", "name")))
    backends = tuple(map(known_backends.get, dict.fromkeys(general.pop("backends"))))
    framework = _framework(tables, backends, where)
    kernels = tuple(_kernel(name, table) for name, table in tables.get("kernel", {}).items())
    rust = next((kernel for kernel in kernels if kernel.cargo_manifest), None)
    if rust and not isinstance(framework, TvmFfi):
        raise ConfigError(
            f"a Rust crate needs the framework [tvm-ffi], but this project has [{framework.table}]",
            where=str(TomlPlace(where, f"kernel.{rust.name}", "language")),
            hint="export the crate's functions for TVM FFI, and write [tvm-ffi] in place of the table",
        )
    by_backend = {known_backends.get(name): general.pop(name) for name in known_backends.NAMES if name in general}
    for backend, settings in by_backend.items():
        _check_range(settings.get("minver"), settings.get("maxver"), TomlPlace(where, f"general.{backend}"))
    hub = general.pop("hub", {})
    general.pop("edition")
    upstream = general.pop("upstream", ())
    return Project(
        root=root,
        backends=backends,
        framework=framework,
        kernels=kernels,
        warnings=(
            *warnings,
            *compiler_flags.notices(framework.table, getattr(framework, "cxx_flags", ())),
            *(
                notice
                for kernel in kernels
                for notice in compiler_flags.notices(f"kernel.{kernel.name}", kernel.cxx_flags)
            ),
            *(notice for kernel in kernels for notice in kernel.backend.notes(kernel)),
        ),
        upstream=(upstream,) if isinstance(upstream, str) else upstream,
        kernel_depends=_dependencies(general.pop("kernel_depends", ())),
        backend_python_depends={
            backend: depends for backend, table in by_backend.items() if (depends := table.pop("python_depends", ()))
        },
        backend_kernel_depends={
            backend: _dependencies(depends)
            for backend, table in by_backend.items()
            if (depends := table.pop("kernel_depends", ()))
        },
        backend_settings={backend: table for backend, table in by_backend.items() if table},
        hub_repo_id=hub.get("repo_id"),
        hub_branch=hub.get("branch"),
        **general,
    )


def check_name(name: str, where: str) -> None:
    """Raise an error if the module of a kernel's wheel would hide a module that Python or kernels need."""
    if (module := python_name(name)) in sys.stdlib_module_names or module in _MODULES:
        raise ConfigError(
            f"{name!r} cannot be a kernel's name: its wheel would replace or hide the module {module}",
            where=where,
            hint=f"use another name, such as my-{name}",
        )


def _framework(
    tables: Mapping[str, Any], backends: tuple[Backend, ...], where: str
) -> TorchFramework | TorchNoarch | TvmFfi:
    if "torch_noarch" in tables:
        return TorchNoarch(**tables["torch_noarch"])
    if "tvm_ffi" in tables:
        return TvmFfi(**tables["tvm_ffi"])
    values = _with_includes(tables["torch"])
    _check_range(values.get("minver"), values.get("maxver"), TomlPlace(where, TorchFramework.table))
    since = values.pop("stable_abi", {})  # one release for all backends, or by name
    by_name: Mapping[str, Release] = since if isinstance(since, dict) else {b.name: since for b in backends}
    newest = matrix.load().torch[-1]
    if unknown := next((release for release in by_name.values() if release > newest), None):
        raise ConfigError(
            f"{unknown} is newer than Torch {newest}, the newest release that this builder knows",
            where=str(TomlPlace(where, TorchFramework.table, "stable-abi")),
            hint="name the oldest release that users may have, such as 2.10; or use a newer builder",
        )
    stable_abi = {backend: by_name[backend.name] for backend in backends if backend.name in by_name}
    return TorchFramework(**values, stable_abi=stable_abi)


def _kernel(name: str, table: Mapping[str, Any]) -> Kernel:
    values = _with_includes(table)
    backend = values.pop("language").partition("-")[2]
    return Kernel(name, known_backends.get(backend), **values)


def _dependencies(tables: tuple[dict[str, Any], ...]) -> tuple[KernelDependency, ...]:
    return tuple(KernelDependency(**table) for table in tables)


def _with_includes(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table; the project's directories in its flags (`-I`) are moved to `include`."""
    values = dict(table)
    for key in values.keys() & set(kernel_sources.FLAGS):
        values[key], directories = compiler_flags.split_includes(values[key])
        if directories:
            values["include"] = tuple(dict.fromkeys((*values.get("include", ()), *directories)))
    return values


def read_text(path: Path) -> str:
    """Return the text of the `build.toml` at `path`, without a byte order mark."""
    if path.parent.is_file():
        raise ConfigError(
            "is a file; expected a directory with a build.toml",
            where=str(path.parent),
            hint="give the project's directory, or run the command there without one",
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
            "is larger than 1 MB", where=str(path), hint="check that this is a build.toml, which usually has a few kB"
        )
    return toml_file.decode(content, str(path))


def _check_range(low: Version | None, high: Version | None, place: TomlPlace) -> None:
    if low and high and low > high:
        raise ConfigError(
            f"no version is at least {low} and at most {high}",
            where=str(place.at("minver")),
            hint="`minver` and `maxver` both include the version they name; swap them, or remove one",
        )
