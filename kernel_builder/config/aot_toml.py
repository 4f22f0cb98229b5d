"""Reads aot.toml, beside the build.toml of a Python-only project: the ops that its Triton kernels are compiled to.

Such a project offers two kinds of packages: its Python files for every back end, and binaries for CUDA and ROCm, which
have neither Triton nor its compiler. `kernel_builder.aot` makes the project that the binaries are built of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config.project import Kernel, Project, TorchFramework, TorchNoarch
from kernel_builder.config.toml_schema import SchemaReader, TomlPlace
from kernel_format.errors import ConfigError
from kernel_format.release import Release

FILE = "aot.toml"
SCHEMA: Mapping[str, Any] = json.loads(Path(__file__).with_name("aot.schema.json").read_text())
_READER = SchemaReader(SCHEMA["definitions"], "docs/triton.md")
STABLE_ABI = Release(2, 10)
# From 9.0 on, Triton's code runs on GPUs of exactly its capability; 8.6 and 8.9 have less shared memory than 8.0.
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0")


def read(root: Path) -> dict[str, Any]:
    """Return the tables of a project's aot.toml, with their keys checked.

    Raises:
        ConfigError: If it is no TOML, or a key is unknown, missing or has another type.
    """
    path = root / FILE
    document = toml_file.read(path)
    for name, table in document.get("op", {}).items():
        for key in table.keys() & SCHEMA["properties"].keys() if isinstance(table, dict) else ():
            raise ConfigError("is not a key of an op", where=f"{path}: [op.{name}] {key}", hint="write it above [op]")
    if document.get("op") == {}:
        raise ConfigError("has no op", where=f"{path}: [op]", hint="add a table [op.NAME] for each launch function")
    tables: dict[str, Any] = _READER.read(document, SCHEMA, TomlPlace(str(path)))
    return tables


def compiled(project: Project) -> Project | None:
    """Return the compiled project that offers the binary variants of a project; None without an aot.toml.

    It has no sources: they are generated before they are compiled.
    """
    path = project.root / FILE
    if not path.is_file():
        return None
    if not isinstance(project.framework, TorchNoarch):
        raise ConfigError(
            f"the project has [{project.framework.table}]; expected [torch-noarch]",
            where=str(path),
            hint="move the Triton kernels to a separate Python-only project, or remove the file",
        )
    tables = read(project.root)
    if project.root / tables["source"] not in (file for _, file in project.python_files):
        raise ConfigError(
            f"there is no file {tables['source']} in the package",
            where=f"{path}: source",
            hint="name the module with the @triton.jit functions and their launch functions",
        )
    names = ("cuda",) if tables.get("language") == "cute-dsl" else ("cuda", "rocm")
    backends = tuple(backend for backend in project.backends if backend.name in names)
    if not backends:
        raise ConfigError(
            f"its kernels are compiled for {' and '.join(names)}, and `backends` in build.toml has none of them",
            where=str(path),
            hint='add "cuda" to `backends`',
        )
    capabilities = tuple(tables.get("capabilities", CAPABILITIES))
    archs = project.framework.rocm_archs
    return replace(
        project,
        backends=backends,
        framework=TorchFramework(pyext=project.framework.pyext, stable_abi=dict.fromkeys(backends, STABLE_ABI)),
        kernels=tuple(
            Kernel(project.python_name, backend, (), (), cuda_capabilities=capabilities, rocm_archs=archs)
            for backend in backends
        ),
    )
