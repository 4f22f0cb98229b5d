"""The metadata of a kernel's wheel: its requirements, and the text in an index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import Metadata, RawMetadata
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from kernel_builder.config.project import Project, distribution_name
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, Variant
from kernel_format.errors import ConfigError

# The oldest Python of Torch 2.10 and of the checks.
_PYTHON = ">=3.10"


def metadata(
    project: Project, variants: Sequence[Variant], card: str, name: str | None = None, version: str | None = None
) -> Metadata:
    """Return the metadata of a wheel for variants of a project.

    Args:
        card: The text in the index, in Markdown.
        name: The name in the index; the project's name if None.
        version: The version in the index; `<version of the project>.0` if None.
    """
    extras = {backend.name: depends for backend, depends in project.backend_python_depends.items() if depends}
    raw: RawMetadata = {
        "metadata_version": "2.4",
        "name": _name(name or project.name),
        "version": _version(project, version),
        "summary": f"The kernel {project.name} for PyTorch",
        "description": card,
        "description_content_type": "text/markdown",
        "requires_python": _PYTHON,
        "requires_dist": [
            _torch(variants),
            *(distribution_name(dependency) for dependency in project.python_depends),
            *(
                f'{distribution_name(dependency)}; extra == "{extra}"'
                for extra, depends in extras.items()
                for dependency in depends
            ),
        ],
        "provides_extra": sorted(extras),
        "project_urls": dict(_urls(project)),
    }
    try:
        raw["license_expression"] = canonicalize_license_expression(project.license)
    except InvalidLicenseExpression:
        raw["license"] = project.license
    return Metadata.from_raw(raw)


def _name(name: str) -> str:
    try:
        return canonicalize_name(name, validate=True)
    except InvalidName as error:
        raise ConfigError(
            f"{name!r} is not a valid name for a package index",
            where="--name",
            hint="use letters, digits, and single hyphens between them: my-kernel",
        ) from error


def _version(project: Project, version: str | None) -> str:
    hint = f"use a version such as {project.version}.3; the major number is `version` in build.toml"
    try:
        parsed = Version(version or f"{project.version}.0")
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
    upstream = (
        (f"Upstream {number}" if number > 1 else "Upstream", url) for number, url in enumerate(project.upstream, 1)
    )
    for label, url in (("Source", project.source), *upstream):
        if url and url.startswith(("https://", "http://")):
            yield label, url
