"""A planned variant and its binary -> the files of a package, as the public client loads it."""

from __future__ import annotations

import shutil
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels_data import Digest, DigestAlgorithm

from kernel_builder.config.project import KernelDependency
from kernel_builder.config.variant import TvmFfiAbi
from kernel_builder.steps.graph import PlannedVariant, digest
from kernel_format.files import read_unchanged, write_files
from kernel_format.metadata import CAPABILITIES_LIMITED, NAME, PLACE, SOURCES, PackageMetadata

# Increment when a change here changes the files of a package for equal inputs.
_RECIPE = 2

_TEMPLATES = ("_ops.py", "_ops_names.py", "_ops_tvm_ffi.py", "_ops_depends.py", "compat_init.py")

# The first releases of `kernels` that give a kernel those that it depends on, and that read several `upstream`
# repositories; in three parts, as the client reads them.
_DEPENDENCIES_SINCE = "0.17.0"
_UPSTREAMS_SINCE = "0.18.0"


def package_key(planned: PlannedVariant) -> str:
    """Return a digest of everything that determines a package's files."""
    binary = planned.binary.key if planned.binary else None
    templates = [_template(name) for name in _TEMPLATES]
    # The id, which is part of the metadata, is a digest of the Python files.
    return digest("package", _RECIPE, planned.variant.name, binary, _metadata(planned).to_dict(), templates)


def assemble(planned: PlannedVariant, binary: Path | None, directory: Path) -> None:
    """Write a package into `directory`, which must not exist."""
    project = planned.project
    on_tvm_ffi = isinstance(planned.variant.framework, TvmFfiAbi)
    ops = "import torch\n\n" if binary is None else _template("_ops_tvm_ffi.py" if on_tvm_ffi else "_ops.py")
    ops += "" if on_tvm_ffi else _template("_ops_names.py")
    depends = project.kernel_depends or any(project.backend_kernel_depends.values())
    templates = {"_ops.py": ops + (_template("_ops_depends.py") if depends else "")}
    # Python prefers a directory to a module of the same name, so the directory would hide the project's module.
    if f"{project.python_name}.py" not in planned.python:
        templates[f"{project.python_name}/__init__.py"] = _template("compat_init.py")
    machine = (planned.variant.platform or "").partition("-")[0]
    names = {"namespace": planned.module, "machine": machine, "python_name": project.python_name}
    written = {name: string.Template(template).substitute(names) for name, template in templates.items()}
    python = {name: read_unchanged(source, planned.python[name]) for name, source in project.python_files}
    write_files(directory, {**written, **python})
    if binary is not None:
        library = directory / f"{planned.module}{'.so' if on_tvm_ffi else '.abi3.so'}"
        shutil.copyfile(binary, library)
        library.chmod(0o755)
    computed = Digest.hash_variant(DigestAlgorithm.SHA256, directory)
    files = {"algorithm": "sha256", "files": dict(sorted(computed.files.items()))}
    (directory / NAME).write_text(replace(_metadata(planned), digest=files).to_json(), encoding="utf-8")


def _metadata(planned: PlannedVariant) -> PackageMetadata:
    """Return the metadata of a package, without the digest of its files."""
    project, backend = planned.project, planned.variant.backend
    limited = sorted({only for kernel in project.kernels for only in kernel.only_capabilities if planned.archs})
    minver = _UPSTREAMS_SINCE if len(project.upstream) > 1 else None
    kernel_depends = [*project.kernel_depends, *project.backend_kernel_depends.get(backend, ())]
    return PackageMetadata(
        id=planned.module,
        name=project.name,
        version=project.version,
        license=project.license,
        python_depends=(*project.python_depends, *project.backend_python_depends.get(backend, ())),
        kernel_depends=tuple(_dependency(depend) for depend in kernel_depends),
        kernels_minver=minver or (_DEPENDENCIES_SINCE if kernel_depends else None),
        backend=backend.name,
        archs=planned.archs,
        provenance={
            **planned.provenance,
            SOURCES: planned.sources,
            PLACE: {"repo-id": project.hub_repo_id, "variant": planned.variant.name},
            **({CAPABILITIES_LIMITED: limited} if limited else {}),
        },
        upstream=project.upstream,
        source=project.source,
    )


def _dependency(depend: KernelDependency) -> dict[str, Any]:
    pinned = {"version": depend.version} if depend.version is not None else {"revision": depend.revision}
    return {"repo-id": depend.repo_id, **pinned}


def _template(name: str) -> str:
    return (Path(__file__).parents[1] / "templates" / name).read_text()
