"""Whether the packages of a repository come from the sources that are to be published to it.

Packages do not record the repository of their sources: equal sources give equal bytes, from every clone and without a
remote. They record the commit, and the project's git repository has that commit in every clone and fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from kernel_builder.checkouts import git_output
from kernel_builder.config.ownership import VARIABLE
from kernel_builder.config.project import Project
from kernel_builder.hub.publication import OTHER_SOURCES
from kernel_builder.hub.remote_repository import Content, RemoteRepository
from kernel_builder.plural import some_of
from kernel_format.errors import HubError
from kernel_format.metadata import NAME, PackageMetadata

_NAMED = 3  # variants named in a message; the rest is counted


def require_same_sources(
    repository: RemoteRepository, project: Project, branch: str, contents: Mapping[str, Content]
) -> None:
    """Raise if the repository has packages, and none of them comes from the project's sources.

    One such package is enough: after `--allow other-sources`, packages of the earlier sources may remain.

    Args:
        branch: The branch of the builds.
        contents: The packages to publish: path in the repository -> content.

    Raises:
        HubError: Names the origins of both.
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
        commit = _git(project.root, "rev-parse", "--verify", "HEAD")
        own = f"commit {commit[:12]} of {project.root}" if commit else f"{project.root}, without a commit"
        shallow = _git(project.root, "rev-parse", "--is-shallow-repository") == "true"
        raise HubError(
            f"the repository's packages come from other sources:{listed}\n  the packages to publish: {own}",
            where=repository.url,
            hint=f"{'run `git fetch --unshallow` first, since this clone may lack the commit; or ' if shallow else ''}"
            f"publish to another owner with --owner NAME or ${VARIABLE}; or replace them with --allow {OTHER_SOURCES}",
        )


def _other_origin(metadata: PackageMetadata, project: Project) -> str | None:
    """Describe the origin of a package, or return None if it is, or may be, the project."""
    theirs, own = _address(metadata.source or ""), _address(project.source or "")
    if theirs and theirs == own:
        return None
    of = f" of {theirs}" if theirs else ""
    if commit := metadata.origin("kernel").get("commit"):
        known = _git(project.root, "cat-file", "-e", f"{commit}^{{commit}}") is not None
        return None if known else f"commit {commit[:12]}{of}"
    if not metadata.recorded_sources:
        return f"another builder, which did not record the sources{of}"
    # Nothing states the origin of files without a commit.
    return f"files without a commit{of}" if theirs and own else None


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        output = git_output(directory, *arguments)
    except FileNotFoundError:
        return None
    return None if output is None else os.fsdecode(output).strip()


def _address(url: str) -> str:
    """Return host and path of a git repository, which do not depend on the protocol; empty for a directory."""
    host, path = r"(?P<host>[\w-]+(?:\.[\w-]+)*)", r"(?P<path>[^\s/:][^\s:]*?)(?:\.git)?/*"
    for form in (rf"(?:git\+)?\w+://(?:[^@/]*@)?{host}(?::\d+)?/{path}", rf"(?:[^@/]*@)?{host}:{path}"):
        if match := re.fullmatch(form, url):
            return f"{match['host'].lower()}/{match['path']}"
    return ""
