"""`build.toml`, edition 5, and the files it names, as one frozen value.

A project knows nothing of what can be built: whether a toolchain has the CUDA it asks for is for others to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernel_builder.config import build_toml
from kernel_builder.config.toml_schema import TomlPlace
from kernel_builder.config.variant import BACKENDS, Release
from kernel_builder.errors import ConfigError

_PYEXT = ("py", "pyi")
_BYTECODE = (".pyc", ".pyo")


@dataclass(frozen=True)
class Kernel:
    """One `[kernel.<name>]` table: sources that one backend's compiler gets with one set of flags.

    Paths are relative to the project and exist. `cuda_capabilities` is None where the kernel is for all of them.
    """

    name: str
    backend: str
    depends: tuple[str, ...]
    src: tuple[str, ...]
    include: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    cuda_capabilities: tuple[str, ...] | None = None
    cuda_flags: tuple[str, ...] = ()
    cuda_minver: Release | None = None
    rocm_archs: tuple[str, ...] | None = None
    hip_flags: tuple[str, ...] = ()
    sycl_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchFramework:
    """`[torch]`: a compiled extension. `stable_abi` has the backends that are built for Torch's stable ABI."""

    src: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    pyext: tuple[str, ...] = _PYEXT
    cxx_flags: tuple[str, ...] = ()
    minver: Release | None = None
    maxver: Release | None = None
    stable_abi: Mapping[str, Release] = field(default_factory=dict)


@dataclass(frozen=True)
class TorchNoarch:
    """`[torch-noarch]`: Python only."""

    pyext: tuple[str, ...] = _PYEXT
    cuda_capabilities: tuple[str, ...] | None = None
    rocm_archs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TvmFfi:
    """`[tvm-ffi]`: a compiled extension that does not link Torch."""

    src: tuple[str, ...]
    include: tuple[str, ...] = ()
    pyext: tuple[str, ...] = _PYEXT
    cxx_flags: tuple[str, ...] = ()


Framework = TorchFramework | TorchNoarch | TvmFfi


@dataclass(frozen=True)
class KernelDependency:
    """Another kernel of the Hub, at a version (the API major) or at a revision of its repository."""

    repo_id: str
    version: int | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Project:
    """A directory with a `build.toml`, read and validated.

    `python_files` are the files of the Python package that `pyext` selects, as (path inside the package, file),
    sorted. `backend_python_depends` and `backend_kernel_depends` come on top of the general ones for their backend.
    """

    root: Path
    name: str
    version: int
    license: str
    backends: tuple[str, ...]
    framework: Framework
    kernels: tuple[Kernel, ...]
    python_files: tuple[tuple[str, Path], ...]
    upstream: str | None = None
    source: str | None = None
    python_depends: tuple[str, ...] = ()
    backend_python_depends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kernel_depends: tuple[KernelDependency, ...] = ()
    backend_kernel_depends: Mapping[str, tuple[KernelDependency, ...]] = field(default_factory=dict)
    cuda_minver: Release | None = None
    cuda_maxver: Release | None = None
    hub_repo_id: str | None = None
    hub_branch: str | None = None

    @property
    def python_name(self) -> str:
        """The name of the Python package."""
        return python_name(self.name)


def python_name(name: str) -> str:
    """The Python package of the kernel `name`: `flash-attn` is `flash_attn`."""
    return name.replace("-", "_")


# Framework table -> the value it makes, and the directory that has its Python package.
_FRAMEWORKS: Mapping[str, tuple[type[Framework], str]] = {
    "torch": (TorchFramework, "torch-ext"),
    "torch-noarch": (TorchNoarch, "torch-ext"),
    "tvm-ffi": (TvmFfi, "tvm-ffi-ext"),
}


def read(directory: Path) -> Project:
    """Read and validate the project in `directory`.

    Raises:
        ConfigError: If `build.toml` is missing, is not TOML, or is not what edition 5 allows, or if a file that it
            names is missing or outside the project.
    """
    file = directory / build_toml.FILE
    project = from_tables(Path(os.path.realpath(directory)), build_toml.read(file))
    table, folder = next(
        (table, folder) for table, (make, folder) in _FRAMEWORKS.items() if isinstance(project.framework, make)
    )
    if not isinstance(project.framework, TorchNoarch):
        _check_files(project.root, project.framework.src, project.framework.include, TomlPlace(str(file), table))
    for kernel in project.kernels:
        _check_files(project.root, kernel.src, kernel.include, TomlPlace(str(file), f"kernel.{kernel.name}"))
    package = directory / folder / project.python_name
    return replace(project, python_files=_python_files(project.root, package, project.framework.pyext))


def from_tables(root: Path, tables: Mapping[str, Any]) -> Project:
    """The project that the validated tables of a `build.toml` describe, without its Python files.

    Whether the files that they name exist in `root` is not asked. `root` itself is free of links.
    """
    general = tables["general"]
    backends = tuple(dict.fromkeys(general["backends"]))
    table = next(name for name in _FRAMEWORKS if name.replace("-", "_") in tables)
    make, _ = _FRAMEWORKS[table]
    given = tables[table.replace("-", "_")]
    if isinstance(given.get("stable_abi"), Release):
        given = {**given, "stable_abi": dict.fromkeys(backends, given["stable_abi"])}
    cuda = general.get("cuda", {})
    hub = general.get("hub", {})
    return Project(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        backends=backends,
        framework=make(**given),
        kernels=tuple(Kernel(**kernel) for kernel in tables.get("kernel", {}).values()),
        python_files=(),
        upstream=general.get("upstream"),
        source=general.get("source"),
        python_depends=general.get("python_depends", ()),
        backend_python_depends=_of_backends(general, "python_depends"),
        kernel_depends=_dependencies(general.get("kernel_depends", ())),
        backend_kernel_depends={
            backend: _dependencies(given) for backend, given in _of_backends(general, "kernel_depends").items()
        },
        cuda_minver=cuda.get("minver"),
        cuda_maxver=cuda.get("maxver"),
        hub_repo_id=hub.get("repo_id"),
        hub_branch=hub.get("branch"),
    )


def _dependencies(tables: Sequence[Mapping[str, Any]]) -> tuple[KernelDependency, ...]:
    return tuple(KernelDependency(**table) for table in tables)


def _of_backends(general: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What the tables `[general.<backend>]` say for `key`, by backend."""
    return {backend: general[backend][key] for backend in BACKENDS if general.get(backend, {}).get(key)}


def _check_files(root: Path, src: tuple[str, ...], include: tuple[str, ...], place: TomlPlace) -> None:
    """Refuse sources and include directories that are missing, named twice, or outside the project."""
    for key, paths, kind, exists in (
        ("src", src, "file", Path.is_file),
        ("include", include, "directory", Path.is_dir),
    ):
        where = str(place.at(key))
        for path in paths:
            if not _holds(exists, root / path):
                raise ConfigError(
                    f"there is no {kind} {path!r} in the project",
                    where=where,
                    hint="make it, or mend its name; names are relative to the directory of build.toml",
                )
            if not _inside(root, root / path):
                raise _leaves(path, where)
            if key == "src" and paths.count(path) > 1:
                raise ConfigError(f"{path!r} is named twice", where=where, hint="name it once: its symbols would clash")


def _holds(test: Callable[[Path], bool], path: Path) -> bool:
    try:
        return test(path)
    except OSError:  # for example a name that is longer than the file system allows
        return False


def _inside(root: Path, path: Path) -> bool:
    """Whether `path`, with symbolic links followed, is in the project. `root` itself is free of links."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def _leaves(path: str, where: str) -> ConfigError:
    return ConfigError(
        f"{path!r} is a symbolic link out of the project",
        where=where,
        hint="copy what it points to into the project: a kernel is built from its own files only",
    )


def _python_files(root: Path, package: Path, pyext: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """The files of the directory `package` that end in one of `pyext`, without hidden files and bytecode."""
    if not _inside(root, package):
        raise _leaves(package.name, str(package))
    endings = tuple(f".{ending}" for ending in pyext)
    found = dict(sorted((path.relative_to(package).as_posix(), path) for path in _walk(root, package, endings)))
    if "__init__.py" not in found:
        raise ConfigError(
            "there is no such file with an ending of `pyext`; expected the Python package of the kernel",
            where=str(package / "__init__.py"),
            hint='make it (and keep "py" in `pyext`): it is what users of the kernel import',
        )
    # A package built from this has a directory of its own name, for old clients, which a module would be hidden by.
    reserved = {"_ops.py", "metadata.json", package.name, f"{package.name}.py"}
    for taken in reserved & {name.partition("/")[0] for name in found}:
        raise ConfigError(
            "the builder puts something of this name into the package itself",
            where=str(package / taken),
            hint="give it another name",
        )
    return tuple((name, root / path.relative_to(package.parent.parent)) for name, path in found.items())


def _walk(root: Path, top: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Every file below `top` that has one of `endings`."""
    for folder, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        wanted = [
            Path(folder, name)
            for name in files
            if name.endswith(endings) and not name.endswith(_BYTECODE) and not name.startswith(".")
        ]
        for path in [*(Path(folder, name) for name in folders), *wanted]:
            if path.is_symlink() and not _inside(root, path):
                raise _leaves(path.name, str(path))
            if path.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
                raise ConfigError("is a symbolic link to a directory above it", where=str(path), hint="remove the link")
        yield from wanted
