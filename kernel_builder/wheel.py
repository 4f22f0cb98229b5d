"""Wheels of a project's packages for Python's package index, one for each platform.

A wheel has every variant of `build/` for one platform, as on the Hub, and a loader that selects one at import.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import Metadata, RawMetadata
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from kernel_builder.checks.findings import OLDEST_MANYLINUX, OLDEST_PYTHON
from kernel_builder.config.project import Project, TvmFfi, distribution_name, python_name
from kernel_builder.config.project_files import own_directory, read_project
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, Variant
from kernel_builder.hub import card, packages
from kernel_builder.hub.packages import HubPackage
from kernel_builder.package import wheel_archive
from kernel_builder.progress import Progress
from kernel_format.errors import ConfigError, PackageError

_TAKEN = re.compile(rb"_ops(\.| import [\s(\w,]*)get_kernel_dep\b")
_LOADER = Path(__file__).with_name("templates") / "wheel_init.py"


@dataclass(frozen=True)
class WrittenWheel:
    """A wheel, its variants and its requirements."""

    path: Path
    variants: tuple[str, ...]
    requires: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the wheel as `--json` prints it."""
        return {
            "path": str(self.path),
            "size": self.path.stat().st_size,
            "variants": list(self.variants),
            "requires": list(self.requires),
        }


def write_wheels(
    directory: Path,
    progress: Progress,
    *,
    out: Path | None = None,
    name: str | None = None,
    depends: Sequence[str] = (),
    version: str | None = None,
    owner: str | None = None,
    load: bool = True,
    allow: Sequence[str] = (),
) -> tuple[WrittenWheel, ...]:
    """Check the packages of a project, and write one wheel for each platform.

    Args:
        out: The directory of the wheels; None for the project's own `dist`.
        name: The name in the index; None for the project's name.
        depends: `NAME=INDEX_NAME` for each kernel in `kernel-depends` with another name in the index than NAME.
        version: The version in the index; None for `<version of the project>.0`.
        owner: The owner in the wheel's text; None for the owner in `build.toml`.
        load: Check that the packages for this machine load.
        allow: Names of checks whose errors are reported as warnings.
    """
    project = read_project(directory, owner)
    if isinstance(project.framework, TvmFfi):
        raise ConfigError(
            "a wheel selects its variant by the installed Torch, which [tvm-ffi] projects do not use",
            where=str(project.root / "build.toml"),
            hint="publish it to a Hub: `kernel-builder upload`",
        )
    out = out or own_directory(project.root, "dist")
    name = _name(name or project.name)  # before the checks, which take longer
    version = _version(project, version or f"{project.version}.0")
    kernels = _kernels(project, depends)
    checked = packages.without_untested(
        packages.checked_packages(project, progress, load=load, allow=allow),
        "publish it to a Hub: `kernel-builder upload --allow untested`",
    )
    platforms: dict[str, list[Variant]] = {}
    for variant in map(Variant.parse, checked):
        platforms.setdefault(variant.platform or "", []).append(variant)
    for platform in platforms.keys() - {""}:  # pip prefers the wheel of a platform to that of all
        platforms[platform] += platforms.get("", [])
    text = card.source_text(project)
    # All metadata first, so that invalid metadata leaves no wheel behind.
    wheels = [(metadata(project, platforms[key], text, name, version, kernels), key) for key in sorted(platforms)]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for about, platform in wheels:
        names = tuple(variant.name for variant in platforms[platform])
        tag = f"{OLDEST_MANYLINUX}_{platform.partition('-')[0]}" if platform else "any"
        path = wheel_archive.write(out, about, tag, _content(project, [checked[name] for name in names], kernels))
        written.append(WrittenWheel(path, names, tuple(map(str, about.requires_dist or ()))))
    return tuple(written)


def _kernels(project: Project, index_names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the requirement and the version of each kernel that a project depends on, by repository."""
    names, kernels = dict(entry.partition("=")[::2] for entry in index_names), {}
    for depend in (*project.kernel_depends, *itertools.chain(*project.backend_kernel_depends.values())):
        own, version = depend.repo_id.partition("/")[2], depend.version
        if version is None or not python_name(own).isidentifier():
            message = f"a wheel cannot require {depend.repo_id}: pip needs its version, and Python a name to import"
            where = f"{project.root}/build.toml: [general] kernel-depends"
            raise ConfigError(message, where=where, hint='write { repo-id = "org/base", version = 1 }')
        kernels[depend.repo_id] = (f"{_name(names.get(own, own), '--depends')}<{version + 1},>={version}", version)
    if unknown := names.keys() - {repo_id.partition("/")[2] for repo_id in kernels}:
        where, hint = "--depends", "expected NAME=INDEX_NAME, such as base=my-base for org/base"
        raise ConfigError(f"kernel-depends has no {', '.join(sorted(unknown))}", where=where, hint=hint)
    if kernels and not any(_TAKEN.search(path.read_bytes()) for _, path in project.python_files):
        where, hint = f"{project.root}/torch-ext", "write `from ._ops import get_kernel_dep`, and build again"
        raise ConfigError("no module takes get_kernel_dep from ._ops, as a wheel needs", where=where, hint=hint)
    return kernels


def _content(project: Project, of: Sequence[HubPackage], kernels: Mapping[str, Any]) -> dict[str, bytes]:
    top = project.python_name
    content = {f"{top}/__init__.py": _LOADER.read_text().replace("DEPENDS = {}", f"DEPENDS = {kernels}").encode()}
    for package in of:
        if not (package.directory / top / "__init__.py").is_file():
            raise PackageError(
                f"the package has no {top}/__init__.py, so `import {top}` would fail",
                where=str(package.directory),
                hint=f"rename the project's module {top}.py, and build again",
            )
        content |= {f"{top}/{name}": path.read_bytes() for name, path in package.files.items()}
    return content


def metadata(
    project: Project, variants: Sequence[Variant], text: str, name: str, version: str, kernels: Mapping[str, Any]
) -> Metadata:
    """Return the metadata of a wheel for variants of a project, with its text, name and version in the index."""
    extras: dict[str, list[str]] = {}
    for backend, python in project.backend_python_depends.items():
        extras.setdefault(backend.name, []).extend(map(distribution_name, python))
    for backend, depends in project.backend_kernel_depends.items():
        extras.setdefault(backend.name, []).extend(kernels[depend.repo_id][0] for depend in depends)
    raw: RawMetadata = {
        "metadata_version": "2.4",
        "name": name,
        "version": version,
        "summary": f"The kernel {project.name} for PyTorch",
        "description": text,
        "description_content_type": "text/markdown",
        "requires_python": f">={OLDEST_PYTHON}",
        "requires_dist": [
            _torch(variants),
            *map(distribution_name, project.python_depends),
            *(kernels[depend.repo_id][0] for depend in project.kernel_depends),
            *(f'{dependency}; extra == "{extra}"' for extra in extras for dependency in extras[extra]),
        ],
        "provides_extra": sorted(extras),
        "project_urls": dict(_urls(project)),
    }
    try:
        raw["license_expression"] = canonicalize_license_expression(project.license)
    except InvalidLicenseExpression:
        raw["license"] = project.license
    return Metadata.from_raw(raw)


def _name(name: str, option: str = "--name") -> str:
    try:
        return canonicalize_name(name, validate=True)
    except InvalidName as error:
        raise ConfigError(
            f"{name!r} is not a valid name for a package index",
            where=option,
            hint="use letters, digits, and single hyphens between them: my-kernel",
        ) from error


def _version(project: Project, version: str) -> str:
    hint = f"use a version such as {project.version}.3; the major number is `version` in build.toml"
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise ConfigError(f"{version!r} is not a valid Python package version", where="--version", hint=hint) from error
    if parsed.major != project.version:
        raise ConfigError(
            f"{version} does not start with the kernel's version {project.version}", where="--version", hint=hint
        )
    return str(parsed)


def _torch(variants: Sequence[Variant]) -> str:
    """Return the range of Torch releases of the variants."""
    frameworks = [variant.framework for variant in variants]
    if any(isinstance(framework, Noarch) for framework in frameworks):
        return "torch"
    releases = [framework.release for framework in frameworks if isinstance(framework, (StableAbi, FullAbi))]
    if any(isinstance(framework, StableAbi) for framework in frameworks):
        return f"torch>={min(releases)}"
    newest = max(releases)
    return f"torch>={min(releases)},<{Release(newest.major, newest.minor + 1)}"


def _urls(project: Project) -> Iterator[tuple[str, str]]:
    upstream = ((f"Upstream {number}".removesuffix(" 1"), url) for number, url in enumerate(project.upstream, 1))
    for label, url in (("Source", project.source), *upstream):
        if url and url.startswith(("https://", "http://")):
            yield label, url
