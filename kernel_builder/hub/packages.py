"""Packages to be published to a Hub, and packages downloaded from a Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kernel_builder import checks
from kernel_builder.checks.findings import CheckReport, summary_lines
from kernel_builder.config import known_backends
from kernel_builder.config.project import Backend, Project
from kernel_builder.hub import package_api
from kernel_builder.hub.project_sources import refuse_private_key
from kernel_builder.limits import within_limits
from kernel_builder.progress import Progress
from kernel_builder.steps import recorded_sources
from kernel_format.errors import CheckError, PackageError
from kernel_format.metadata import PackageMetadata
from kernel_format.tree_digest import SIGNATURE


@dataclass(frozen=True)
class HubPackage:
    """A `build/<variant>/` directory, built by this or another tool, to be published or compared."""

    directory: Path
    load_skipped: str | None = None

    @property
    def variant(self) -> str:
        return self.directory.name

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The files by their path in a published repository, without bytecode."""
        paths = (path for path in sorted(self.directory.rglob("*")) if path.is_file() and path.suffix != ".pyc")
        return {f"build/{self.variant}/{path.relative_to(self.directory).as_posix()}": path for path in paths}

    @cached_property
    def metadata(self) -> PackageMetadata:
        """The content of `metadata.json`; empty if there is none, as in packages of older tools."""
        return PackageMetadata.read(self.directory) or PackageMetadata()

    @property
    def backend(self) -> Backend:
        """The back end of the variant."""
        name = self.metadata.backend or ""
        return known_backends.get(name) if name in known_backends.NAMES else named_backend(self.variant)

    @property
    def provenance(self) -> dict[str, Mapping[str, Any]]:
        """The origin of the sources (`kernel`) and of the builder (`kernel-builder`)."""
        return {part: self.metadata.origin(part) for part in ("kernel", "kernel-builder")}

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(path.stat().st_size for path in self.files.values())

    @cached_property
    def digest_differences(self) -> tuple[str, ...]:
        """The differences between the files and the digest in the metadata, or the reason why they are not known."""
        report = next(checks.run_all([self.directory], only=("digest",)))
        return tuple(f"{f.path} {f.message}" for f in report.findings) or tuple(report.skipped.values())

    @cached_property
    def api(self) -> package_api.Api:
        """The API, read from the files."""
        return within_limits(lambda: package_api.read(self.directory), str(self.directory))

    def differences(self, newer: HubPackage) -> tuple[str, ...]:
        """Describe how the API of another package differs.

        Backends may have different operators, so between two backends only the common operators are compared.
        """
        old, new = self.api, newer.api
        if self.backend is not newer.backend:
            both = old.ops.keys() & new.ops.keys()
            old, new = (replace(api, ops={name: api.ops[name] for name in both}) for api in (old, new))
        return old.differences(new)


def named_backend(variant: str) -> Backend:
    """Return the back end in a variant's name, or the preferred one if the name has none."""
    return known_backends.named(variant) or max(known_backends.compiled_for(), key=lambda known: known.preference)


def checked_packages(
    project: Project, progress: Progress, *, load: bool, allow: Sequence[str] = ()
) -> Mapping[str, HubPackage]:
    """Check the packages of a project, and return them by variant."""
    build = project.root / "build"
    again = f"rebuild: kernel-builder build {project.root}"
    if project.renamed:
        again += f" --owner {(project.hub_repo_id or '').partition('/')[0]}"
    directories = [path for path in sorted(build.glob("[!.]*")) if path.is_dir()]
    if not directories:
        raise CheckError("there is no package", where=str(build), hint=again.replace("rebuild", "build"))
    checks.require_allowable(allow)
    reports: dict[str, CheckReport] = {}
    checked = checks.run_all(directories, load=load, allow=allow, project=project, progress=progress)
    for directory in directories:
        progress.say(f"checking {directory.name}")
        reports[directory.name] = next(checked)
    if not all(report.ok for report in reports.values()):
        lines = summary_lines(reports, "error", f"`kernel-builder check-builds {project.root}` lists all")
        raise CheckError(
            "packages fail their checks:\n  " + "\n  ".join(lines),
            where=str(build),
            hint=f"`kernel-builder check-builds {project.root}` has details; then {again}",
        )
    packages = {
        name: HubPackage(report.package.directory, report.skipped.get("load")) for name, report in reports.items()
    }
    _check_agreement(project, packages, again)
    _check_sources(project, packages, again)
    for path in (path for package in packages.values() for path in package.files.values()):
        if path.suffix != ".so":
            refuse_private_key(path)
    return packages


def without_untested(packages: Mapping[str, HubPackage], hint: str) -> dict[str, HubPackage]:
    """Return the packages without those whose metadata states that they have not run on their hardware."""
    kept = {name: package for name, package in packages.items() if not package.metadata.status}
    if not kept:
        name, package = next(iter(packages.items()))
        raise CheckError(f"no package remains: {package.metadata.status}", where=name, hint=hint)
    return kept


def _check_agreement(project: Project, packages: Mapping[str, HubPackage], again: str) -> None:
    """Raise unless all packages are of this project, load the same kernels and have all capabilities."""
    for package in packages.values():
        if only := package.metadata.only_capabilities:
            raise PackageError(
                f"the package was built with --capability {', '.join(only)}; expected all of the project's",
                where=str(package.directory),
                hint=f"build without --capability: kernel-builder build {project.root} --variant {package.variant}",
            )
        depends = (*project.kernel_depends, *project.backend_kernel_depends.get(package.backend, ()))
        loads = {str(depend.get("repo-id")) for depend in package.metadata.kernel_depends}
        # A signature is for the repository of the metadata.
        place = package.metadata.place if (package.directory / SIGNATURE).exists() else {}
        for key, actual, expected in (
            ("name", package.metadata.name, project.name),
            ("version", package.metadata.version, project.version),
            ("license", package.metadata.license, project.license),
            ("built-for", place.get("repo-id", project.hub_repo_id), project.hub_repo_id),
            ("kernel-depends", sorted(loads), sorted({depend.repo_id for depend in depends})),
        ):
            if actual != expected:
                raise PackageError(
                    f"`{key}` is {actual!r}; expected {expected!r}, as in build.toml or by --owner",
                    where=str(package.directory / "metadata.json"),
                    hint=again,
                )


def _check_sources(project: Project, packages: Mapping[str, HubPackage], again: str) -> None:
    """Raise unless all packages were built from the project's current sources."""
    stale: dict[tuple[str, ...], list[str]] = {}
    for name, package in packages.items():
        recorded = package.metadata.recorded_sources
        differences = recorded_sources.differences(project, recorded, package.directory)
        if lines := tuple(dict.fromkeys(differences)):
            stale.setdefault(lines, []).append(name)
    if stale:
        listed = "".join(f"\n  {', '.join(names)}:" + "".join(f"\n    {x}" for x in of) for of, names in stale.items())
        raise PackageError(
            f"packages were not built from the project's sources:{listed}",
            where=str(project.root / "build"),
            hint=again,
        )
