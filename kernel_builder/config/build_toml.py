"""The format of `build.toml`: its tables, their keys, and the values that each key takes.

The tables are those of edition 5; `editions` says which older files are read with them.

This module reads the text alone; `project_files` checks the files that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config import editions, kernel_sources, toml_schema
from kernel_builder.config.project import Kernel, KernelDependency, Project, TorchFramework, TorchNoarch, TvmFfi
from kernel_builder.config.toml_schema import Key, TomlPlace
from kernel_builder.config.variant import BACKENDS, Release
from kernel_builder.errors import ConfigError

FILE = "build.toml"
NAME = r"[a-z][-a-z0-9]*[a-z0-9]"
REPO_ID = r"[A-Za-z0-9][-.\w]*/[A-Za-z0-9][-.\w]*"
# The longest build.toml on the Hub has 30 kB.
_MOST_BYTES = 1_000_000

# Packages that a kernel may import besides the standard library and Torch. The public client refuses any other at load.
PYTHON_DEPENDS: Mapping[str, tuple[str, ...]] = {
    "general": ("einops", "helion", "tvm-ffi"),
    "cuda": ("nvidia-cutlass-dsl",),
    "neuron": ("nki",),
    "tpu": (),
    "xpu": ("onednn",),
}
_CUTLASS = ("2_10", "3_5", "3_6", "3_8", "3_9", "4_0", "4_4", "4_5")
KERNEL_DEPENDS = ("torch", *(f"cutlass_{version}" for version in _CUTLASS), "sycl_tla", "metal-cpp")


def _stable_abi(value: Any, place: TomlPlace) -> dict[str, Release]:
    """Read one version for all backends, or a table of backend -> version."""
    if not isinstance(value, dict):
        return dict.fromkeys(BACKENDS, toml_schema.release(value, place))
    return dict(toml_schema.table({backend: Key(toml_schema.release) for backend in BACKENDS})(value, place))


def _kernel_dependency(value: Any, place: TomlPlace) -> KernelDependency:
    keys = {"repo-id": Key(_repo_id, required=True), "version": Key(toml_schema.natural), "revision": Key(_word)}
    dependency: KernelDependency = toml_schema.table(keys, KernelDependency)(value, place)
    if (dependency.version is None) == (dependency.revision is None):
        raise ConfigError(
            f"{dependency.repo_id!r} needs either `version` or `revision`",
            where=str(place),
            hint=f'write {{ repo-id = "{dependency.repo_id}", version = 1 }}',
        )
    return dependency


def _kernel(value: Any, place: TomlPlace) -> Kernel:
    """Read a `[kernel.<name>]` table, whose backend determines the keys that it may have."""
    name = _kernel_name(place.key, place.as_table())
    given = value.get("backend") if isinstance(value, dict) else None
    keys = _KERNEL | _KERNEL_OF.get(given, {}) if isinstance(given, str) else _KERNEL
    kernel: Kernel = toml_schema.table(keys, partial(Kernel, name))(value, place)
    return kernel


def _distinct_backends(value: Any, place: TomlPlace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_backends(value, place)))


# Names of files have at most 255 bytes, and those of binaries have thirty more than the project's.
_MOST_LETTERS = 200
_name = toml_schema.matching(
    rf"(?=.{{1,{_MOST_LETTERS}}}$){NAME}",
    f'a name of small letters, digits and dashes like "my-kernel", of at most {_MOST_LETTERS} letters',
)
_word = toml_schema.matching(r"\S+", "a name without spaces")
_repo_id = toml_schema.matching(REPO_ID, 'a repository\'s name like "org/my-kernel"')
_kernel_name = toml_schema.matching(r"[A-Za-z0-9_][-.\w]*", 'a kernel\'s name of letters, digits, "_", "-" and "."')
_host = r"(?:[A-Za-z0-9][-A-Za-z0-9]*\.)*[A-Za-z][-A-Za-z0-9]*"
_git_url = toml_schema.matching(
    rf"(?:(?:(?:git\+)?(?:https?|ssh)|git)://(?:[\w.-]+@)?{_host}(?::[0-9]{{1,4}})?/\S+|[\w.-]+@{_host}:[^\s:]+)",
    'the URL of a Git repository like "https://github.com/org/repo"',
)
_capability = toml_schema.matching(
    r"[0-9]+\.[0-9][af]?(?:\+PTX)?",
    'a CUDA capability like "9.0"; a suffix `a` or `f` (as in "9.0a") and `+PTX` may follow',
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
    "backends": Key(_distinct_backends, required=True),
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
# The public parser spells two of these keys with underscores, unlike the same keys of a kernel.
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
    TorchFramework.table: Key(toml_schema.table(_TORCH, TorchFramework)),
    TorchNoarch.table: Key(toml_schema.table(_TORCH_NOARCH, TorchNoarch)),
    TvmFfi.table: Key(toml_schema.table(_TVM_FFI, TvmFfi)),
}


def read(path: Path, root: Path) -> Project:
    """Read the `build.toml` at `path` as a project in `root`, without its Python files.

    Paths in the project are relative, but need not exist.

    Raises:
        ConfigError: If the file is missing, is not TOML, or is not valid.
    """
    return from_document(toml_file.parse(read_text(path), str(path)), str(path), root)


def from_document(document: Mapping[str, Any], where: str, root: Path) -> Project:
    """Return the project that a parsed `build.toml` describes.

    Args:
        where: The file name for errors.
        root: The directory of the project, without symbolic links.

    Raises:
        ConfigError: If the document is not valid.
    """
    place = TomlPlace(where)
    document, warnings = editions.as_edition_5(document, place)
    tables = toml_schema.table(_DOCUMENT)(document, place)
    frameworks = [table for table in tables.values() if isinstance(table, (TorchFramework, TorchNoarch, TvmFfi))]
    if len(frameworks) != 1:
        found = " and ".join(f"[{name}]" for name in sorted(framework.table for framework in frameworks))
        raise ConfigError(
            f"expected one framework table, got {found or 'none'}",
            where=str(place),
            hint="keep one of [torch] (compiled), [torch-noarch] (Python only) and [tvm-ffi] (compiled, without Torch)",
        )
    general, framework = tables["general"], frameworks[0]
    general.pop("edition")
    hub = general.pop("hub", {})
    by_backend = {backend: general.pop(backend) for backend in BACKENDS if backend in general}
    cuda = by_backend.get("cuda", {})
    if isinstance(framework, TorchFramework):
        _check_range(framework.minver, framework.maxver, TomlPlace(where, framework.table))
        stable_abi = {
            backend: since for backend, since in framework.stable_abi.items() if backend in general["backends"]
        }
        framework = replace(framework, stable_abi=stable_abi)
    _check_range(cuda.get("minver"), cuda.get("maxver"), TomlPlace(where, "general.cuda"))
    kernels = tuple(tables.get("kernel", {}).values())
    return Project(
        root=root,
        framework=framework,
        kernels=kernels,
        warnings=(*warnings, *kernel_sources.warnings(framework, kernels, general["backends"])),
        backend_python_depends=_of_backends(by_backend, "python_depends"),
        backend_kernel_depends=_of_backends(by_backend, "kernel_depends"),
        cuda_minver=cuda.get("minver"),
        cuda_maxver=cuda.get("maxver"),
        hub_repo_id=hub.get("repo_id"),
        hub_branch=hub.get("branch"),
        **general,
    )


def _of_backends(by_backend: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {backend: table[key] for backend, table in by_backend.items() if table.get(key)}


def read_text(path: Path) -> str:
    """Return the text of the `build.toml` at `path`, without a byte order mark.

    Raises:
        ConfigError: If there is no such file, or it is not a text that could be a `build.toml`.
    """
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


def _check_range(low: Release | None, high: Release | None, place: TomlPlace) -> None:
    if low and high and low > high:
        raise ConfigError(
            f"no version is at least {low} and at most {high}",
            where=str(place.at("minver")),
            hint="`minver` and `maxver` both include the version they name; swap them, or leave one out",
        )
