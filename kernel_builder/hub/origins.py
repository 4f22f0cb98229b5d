"""Whether the packages of a repository come from the sources that are to be published to it.

No package names the repository of its sources: equal sources give equal bytes, from every clone and without a remote.
A package records the commit, and the project's own git repository knows whether it has that commit. It has it in every
clone and fork, in every directory, and whatever the remotes are called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from kernel_builder.checkouts import git_output
from kernel_builder.config.ownership import VARIABLE
from kernel_builder.config.project import Project
from kernel_builder.hub.remote_repository import Content, RemoteRepository
from kernel_builder.plural import some_of
from kernel_format.errors import HubError
from kernel_format.metadata import NAME, PackageMetadata

_NAMED = 3  # so many variants are named


def require_same_sources(
    repository: RemoteRepository, project: Project, branch: str, contents: Mapping[str, Content]
) -> None:
    """Raise if the repository has packages, and none of them comes from the sources of the project.

    One that does is enough: the others were there before somebody gave `--take-over`.

    Args:
        branch: The branch of the builds.
        contents: The packages to publish: path in the repository -> content.

    Raises:
        HubError: Names both origins.
    """
    heads = repository.branches()
    others: dict[str, list[str]] = {}
    for name in sorted(heads, key=lambda name: (name != branch, name)):
        files = repository.files(heads[name])
        variants = sorted({path.split("/")[1] for path in files if re.match(r"build/[^./][^/]*/", path)})
        if not variants:
            continue
        described = (f"build/{variant}/{NAME}" for variant in variants)
        if any(path in contents and contents[path].is_in(files.get(path)) for path in described):
            return
        root = repository.download(heads[name], [f"build/*/{NAME}"])
        for variant in variants:
            metadata = PackageMetadata.read(root / "build" / variant) or PackageMetadata()
            if (origin := _other_origin(metadata, project)) is None:
                return
            others.setdefault(origin, []).append(f"{variant}@{name}")
    if others:
        listed = "".join(f"\n  {some_of(names, _NAMED)}: {origin}" for origin, names in others.items())
        raise HubError(
            f"its packages come from other sources:{listed}\n  those to publish: {_own_origin(project.root)}",
            where=repository.url,
            hint=f"{_unshallow(project.root)}publish to an owner of yours by --owner NAME or ${VARIABLE}; or give "
            "--take-over, and the repository has these sources from now on",
        )


def _other_origin(metadata: PackageMetadata, project: Project) -> str | None:
    """Describe where a package comes from, unless it is, or may be, the project."""
    sources = [address for url in (metadata.source, project.source) if (address := _address(url or ""))]
    if len(sources) == 2 and sources[0] == sources[1]:
        return None
    of = f" of {address}" if (address := _address(metadata.source or "")) else ""
    if commit := metadata.origin("kernel").get("commit"):
        return None if _has_commit(project.root, commit) else f"commit {commit[:12]}{of}"
    if not metadata.recorded_sources:
        return f"built from sources{of} that are not recorded, by another builder"
    # Files that were in no commit say nothing of where they come from.
    return f"files without a commit{of}" if len(sources) == 2 else None


def _has_commit(directory: Path, commit: str) -> bool:
    return _git(directory, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def _own_origin(directory: Path) -> str:
    """Describe where the project comes from. Of a remote's address, its credentials are left out."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return f"{directory}, which is in no commit"
    address = _address(_git(directory, "remote", "get-url", "origin") or "")
    return f"commit {commit[:12]} of {address or directory}"


def _unshallow(directory: Path) -> str:
    """Return what to do first in a clone that lacks earlier commits."""
    if _git(directory, "rev-parse", "--is-shallow-repository") != "true":
        return ""
    return "this clone is shallow and may lack the commit: try again after `git fetch --unshallow`. Otherwise "


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        printed = git_output(directory, *arguments)
    except FileNotFoundError:
        return None
    return None if printed is None else os.fsdecode(printed).strip()


def _address(url: str) -> str:
    """Return host and path of a git repository, which do not depend on the protocol; empty for a directory."""
    host, path = r"(?P<host>[\w-]+(?:\.[\w-]+)*)", r"(?P<path>[^\s/:][^\s:]*?)(?:\.git)?/*"
    for form in (rf"(?:git\+)?\w+://(?:[^@/]*@)?{host}(?::\d+)?/{path}", rf"(?:[^@/]*@)?{host}:{path}"):
        if match := re.fullmatch(form, url):
            return f"{match['host'].lower()}/{match['path']}"
    return ""
