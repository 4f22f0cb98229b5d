"""The packages of a project as they are about to be published, and packages as they have been."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kernel_builder import checks, elf
from kernel_builder.config.project import Project
from kernel_builder.config.variant import BACKENDS
from kernel_builder.errors import CheckError, PackageError
from kernel_builder.hub import package_api

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_VERSION = re.compile(r"[\w.+!-]{1,80}")


def table(value: object) -> Mapping[str, Any]:
    """What should be a table in metadata that others have written; an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def origin(metadata: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """What metadata records of where a part comes from: `version`, `commit`, and whether it was `dirty`.

    Only what a version or a commit can be: it is shown on terminals, and commits are handed to git.
    """
    recorded = table(table(metadata.get("provenance")).get(part))
    known = {"version": _VERSION, "commit": _COMMIT}
    told = {
        key: value
        for key, form in known.items()
        if isinstance(value := recorded.get(key), str) and form.fullmatch(value)
    }
    return {**told, "dirty": bool(recorded.get("dirty"))} if recorded else {}


@dataclass(frozen=True)
class Package:
    """A `build/<variant>/` directory, of whatever tool.

    `loads` says that this machine has loaded it.
    """

    directory: Path
    loads: bool = False

    @property
    def variant(self) -> str:
        """The variant's name."""
        return self.directory.name

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The files by their path in a repository, without bytecode."""
        found = (path for path in sorted(self.directory.rglob("*")) if path.is_file() and path.suffix != ".pyc")
        return {f"build/{self.variant}/{path.relative_to(self.directory).as_posix()}": path for path in found}

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """What `metadata.json` says, nothing where there is none: packages of older tools lack it."""
        try:
            return table(json.loads((self.directory / "metadata.json").read_bytes()))
        except (OSError, ValueError, RecursionError):
            return {}

    @property
    def backend(self) -> str:
        """The backend that it is for."""
        named = table(self.metadata.get("backend")).get("type")
        return str(named or next((part for part in self.variant.split("-") if part in BACKENDS), "cuda"))

    @property
    def archs(self) -> list[str]:
        """The capabilities that it was compiled for."""
        archs = table(self.metadata.get("backend")).get("archs")
        return [str(arch) for arch in archs] if isinstance(archs, list) else []

    def origin(self, part: str) -> Mapping[str, Any]:
        """The provenance of its sources (`kernel`) or of its builder (`kernel-builder`), as far as it is recorded."""
        return origin(self.metadata, part)

    @property
    def is_dirty(self) -> bool:
        """Whether it was built from sources, or by a builder, with changes that no commit has."""
        return any(self.origin(part).get("dirty") for part in ("kernel", "kernel-builder"))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files.values())

    @cached_property
    def api(self) -> package_api.Api:
        """What it offers its users."""
        return package_api.read(self.directory)

    def differences(self, newer: Package) -> tuple[str, ...]:
        """How the API of another package differs.

        Backends may have operators of their own: between two of them, only those that both have are compared.
        """
        old, new = self.api, newer.api
        if self.backend != newer.backend:
            both = old.ops.keys() & new.ops.keys()
            old, new = (replace(one, ops={name: one.ops[name] for name in both}) for one in (old, new))
        return old.differences(new)

    @cached_property
    def compiler(self) -> str | None:
        """What the host compiler calls itself in the binary."""
        for binary in sorted(self.directory.rglob("*.so")):
            with suppress(elf.Unreadable):
                for text in elf.compilers(binary):
                    if text.startswith(("GCC", "clang")):
                        return text
        return None


def spoken_api(packages: Mapping[str, Package]) -> package_api.Api:
    """The API as the module itself tells it, where this machine can load a package, or else as its files do."""
    loads = next((package for package in packages.values() if package.loads), None)
    told = package_api.loaded(loads.directory) if loads else None
    return told or next(iter(packages.values())).api


def checked(project: Project, say: Callable[[str], None], *, load: bool) -> Mapping[str, Package]:
    """The packages of a project by variant, when all have passed their checks.

    Args:
        say: Told what is going on.
        load: Load each package that this machine can load, as a check.

    Raises:
        CheckError: If there is none, or one does not pass its checks.
        PackageError: If one is not of this project as it is now, or if they have different APIs.
    """
    build = project.root / "build"
    again = f"build again: kernel-builder build {project.root}"
    directories = [path for path in sorted(build.glob("[!.]*")) if path.is_dir()]
    if not directories:
        raise CheckError("there is no package to publish", where=str(build), hint=again.replace(" again", " it"))
    findings: list[str] = []
    packages: dict[str, Package] = {}
    for directory in directories:
        say(f"checking {directory.name}")
        report = checks.run(directory, load=load)
        packages[directory.name] = Package(directory, loads="load" in report.passed)
        findings += [
            f"{directory.name}/{found.path}: {found.message} [{found.check}]"
            for found in report.findings
            if found.severity == "error"
        ]
    if findings:
        raise CheckError(
            "nothing is published, since packages do not pass their checks:\n  " + "\n  ".join(findings),
            where=str(build),
            hint=f"`kernel-builder check-builds {project.root}` has more; then {again}",
        )
    first = next(iter(packages.values()))
    for package in packages.values():
        for key, expected in (("name", project.name), ("version", project.version), ("license", project.license)):
            if package.metadata[key] != expected:
                raise PackageError(
                    f"`{key}` is {package.metadata[key]!r}, in build.toml it is {expected!r}",
                    where=str(package.directory / "metadata.json"),
                    hint=again,
                )
        differences = first.differences(package)
        if differences:
            raise PackageError(
                f"its API is not that of {first.variant}:\n  " + "\n  ".join(differences),
                where=str(package.directory),
                hint=f"one of them is of other sources; {again}",
            )
    return packages
