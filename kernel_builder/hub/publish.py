"""Publishing a project: packages to the branch of their version, sources and card to `main`.

Nothing is sent before all checks have passed. The packages become one commit on top of the branch as it was read. If
another publisher has moved the branch, it is read and compared again. Files that the branch already has are not sent
again, so a repeated command completes an interrupted publication.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.hub import card, project_sources
from kernel_builder.hub.content import Content, RemoteFile
from kernel_builder.hub.package_api import Api, breaks_callers
from kernel_builder.hub.packages import HubPackage, checked_packages, named_backend, without_untested
from kernel_builder.hub.publication import API_CHANGE, LARGE_FILE, UNTESTED, BranchResult, Published, PublishRequest
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.hub.retries import Conflict, repeated
from kernel_builder.plural import counted
from kernel_builder.progress import Progress
from kernel_format.errors import ConfigError, HubError
from kernel_format.tree_digest import SIGNATURE

# Files that a Hub creates in a repository.
_CREATED_BY_HUB = (".gitattributes",)


@dataclass(frozen=True)
class _Publication:
    """A publication in progress."""

    request: PublishRequest
    project: Project
    packages: Mapping[str, HubPackage]
    left_out: Mapping[str, str]
    api: Api
    contents: Mapping[str, Content]
    sources: Mapping[str, Content]
    repository: RemoteRepository
    branch: str
    progress: Progress


def publish(request: PublishRequest, progress: Progress) -> Published:
    """Check the packages of a project and publish them.

    Raises:
        ConfigError: If `build.toml` is wrong, or names no repository and the request does not either.
        CheckError: If there is no package, or one fails a check.
        PackageError: If the packages differ in project, version or API.
        HubError: If the Hub refuses, a variant would be left with another API, or the API of a published version would
            change.
    """
    work = _prepared(request, progress)
    created = _ensure_branch(work)
    builds, removed, changes = _write_builds(work)
    main, kept, note = _write_main(work)
    everything = {**work.packages, **kept}
    return Published(
        repo_id=work.repository.repo_id,
        endpoint=work.repository.api.endpoint,
        url=work.repository.url,
        version=work.project.version,
        dry_run=request.dry_run,
        created=created,
        variants=tuple(work.packages),
        kept=tuple(sorted(kept)),
        removed=removed,
        dirty=tuple(sorted(name for name, package in everything.items() if package.metadata.is_dirty)),
        without_commit=tuple(sorted(name for name, package in everything.items() if not package.metadata.has_commit)),
        not_loaded={name: package.load_skipped for name, package in work.packages.items() if package.load_skipped},
        left_out=work.left_out,
        api_changes=changes,
        builds=builds,
        main=main,
        note=note,
    )


def _prepared(request: PublishRequest, progress: Progress) -> _Publication:
    """Read the project, check its packages, and hash their files."""
    project = read_project(request.directory, request.owner, request.repo_id)
    if not project.hub_repo_id:
        raise ConfigError(
            "there is no repository to publish to",
            where=f"{project.root / 'build.toml'}: [general.hub] repo-id",
            hint='add repo-id = "organization/name" there, or use --repo-id or --owner',
        )
    branch = request.branch or project.hub_branch or f"v{project.version}"
    _check_branch(branch, project)
    repository = RemoteRepository(project.hub_repo_id, endpoint=request.endpoint)
    if not request.dry_run:
        repository.require_write()
    checked = checked_packages(project, progress, load=request.load, allow=request.allowed_checks)
    packages = checked
    if UNTESTED not in request.allow:
        packages = without_untested(checked, f"`--allow {UNTESTED}` publishes it")
    contents = {path: Content(file) for package in packages.values() for path, file in package.files.items()}
    left_out = {name: str(checked[name].metadata.status) for name in checked.keys() - packages.keys()}
    api = next(iter(packages.values())).api
    limit = {"largest": sys.maxsize} if LARGE_FILE in request.allow else {}
    files = project_sources.published_files(project.root, **limit)
    project_sources.check_complete(project, files)
    sources = project_sources.with_names_of_owner(project, files)
    if not project_sources.is_in_git(project.root):
        progress.say("git does not track the project: only its sources and texts are published on main")
    for name in project_sources.with_marks(project.root, files):
        progress.say(f"warning: {name} still has texts of a new project, marked `Not written yet`")
    return _Publication(request, project, packages, left_out, api, contents, sources, repository, branch, progress)


def _check_branch(branch: str, project: Project) -> None:
    number = branch[1:]
    if branch == "main":
        raise ConfigError(
            "`main` holds the sources and the card; packages belong on the branch of their version",
            where="--branch or [general.hub] branch",
            hint=f"remove it to publish to v{project.version}",
        )
    if branch.startswith("v") and number.isdecimal() and int(number) != project.version:
        raise ConfigError(
            f"the branch {branch} is for version {number}, and the project's version is {project.version}",
            where="--branch or [general.hub] branch",
            hint="set `version` in build.toml and build again, or remove the branch",
        )


def _ensure_branch(work: _Publication) -> bool:
    """Create the repository and the branch of the builds, except in a dry run; return whether there was none."""
    request, repository = work.request, work.repository
    private = repository.is_private()
    if request.private and private is False:
        raise HubError(
            "the repository exists and is public; --private applies to new repositories only",
            where=repository.url,
            hint="make it private in its settings, or remove --private",
        )
    if private is None and not request.dry_run:
        work.progress.say(f"creating {repository.url}")
        repository.create(private=request.private)
    if work.branch not in repository.branches() and not request.dry_run:
        repository.create_branch(work.branch)
    return private is None


@repeated(Conflict)
def _write_builds(work: _Publication) -> tuple[BranchResult, tuple[str, ...], tuple[str, ...]]:
    """Update the branch of the builds.

    Returns:
        The changes to the branch, the deleted variants, and the differences of the API.
    """
    heads = work.repository.branches()
    there = work.repository.files(heads[work.branch]) if work.branch in heads else {}
    others = sorted(_variants(there) - work.packages.keys())
    removed = others if work.request.prune else []
    changes = _check_version(work, heads[work.branch], there) if _variants(there) else ()
    outdated = list(_outdated(work, there, removed))
    if not _variants(there) and work.branch == f"v{work.project.version}" and "main" in heads:
        # The new branch of a version starts as a copy of main.
        on_main = work.repository.files(heads["main"])
        outdated += [p for p, file in there.items() if p not in _CREATED_BY_HUB and on_main.get(p) == file]
    message = f"Build of {work.project.name} {work.project.version}"
    result = _write_branch(work, work.branch, heads.get(work.branch), there, work.contents, outdated, message)
    return result, tuple(removed), changes


@repeated(Conflict)
def _write_main(work: _Publication) -> tuple[BranchResult | None, Mapping[str, HubPackage], str | None]:
    """Update `main`, after the builds.

    Returns:
        The changes to `main`, the packages on the branch of the builds that are not part of this publication, and the
        reason if `main` was left unchanged.
    """
    project, repository = work.project, work.repository
    heads = repository.branches()
    there = repository.files(heads[work.branch]) if work.branch in heads else {}
    kept: Mapping[str, HubPackage] = {}
    if not work.request.prune and _variants(there):
        kept = _downloaded(repository, heads[work.branch], _variants(there) - work.packages.keys())
    newest = max((int(name[1:]) for name in heads if name[0] == "v" and name[1:].isdecimal()), default=0)
    if work.branch != f"v{project.version}":
        return None, kept, f"main is left unchanged: {work.branch} is not the branch of a version"
    if newest > project.version:
        return None, kept, f"main is left unchanged: it belongs to version {newest}"
    text = card.render(project, repository.repo_id, {**work.packages, **kept}, work.api, work.request.card_note)
    wanted = {**work.sources, "README.md": Content(text.encode())}
    on_main = repository.files(heads["main"]) if "main" in heads else {}
    message = f"Sources and card of {project.name} {project.version}"
    outdated = project_sources.outdated(on_main, wanted)
    return _write_branch(work, "main", heads.get("main"), on_main, wanted, outdated, message), kept, None


def _write_branch(
    work: _Publication,
    branch: str,
    head: str | None,
    present: Mapping[str, RemoteFile],
    wanted: Mapping[str, Content],
    outdated: Iterable[str],
    message: str,
) -> BranchResult:
    """Commit the contents that differ, and delete the outdated files."""
    request, repository = work.request, work.repository
    add = {path: content for path, content in wanted.items() if not content.is_in(present.get(path))}
    delete = tuple(sorted(outdated))
    size = sum({content.sha256: content.size for content in add.values()}.values())
    result = BranchResult(branch, tuple(add), size, len(wanted) - len(add), delete)
    if request.dry_run or not (add or delete):
        return result
    if head is None:
        raise Conflict("the branch was deleted during the publication", where=f"{repository.repo_id}@{branch}")
    work.progress.say(f"{branch}: sending {counted(len(add), 'file')}, {size / 2**20:.1f} MiB")
    commit = repository.commit(branch, head, add=add, delete=delete, message=message, create_pr=request.create_pr)
    there = {} if request.create_pr else repository.files(commit.oid)
    lost = [path for path, content in add.items() if not (request.create_pr or content.is_in(there.get(path)))]
    if lost:
        raise HubError(
            f"the commit lacks {len(lost)} of the files sent, the first is {lost[0]}",
            where=f"{repository.repo_id}@{commit.oid}",
            hint="delete the .gitignore of the repository, if it has one, and run the same command again",
        )
    return replace(result, revision=commit.oid, url=commit.commit_url, pull_request=commit.pr_url)


def _check_version(work: _Publication, revision: str, there: Mapping[str, RemoteFile]) -> tuple[str, ...]:
    """Refuse to change the API of a version, or to have different APIs in the variants of a version.

    Returns:
        The differences between the API on the branch and the published one.
    """
    left = set() if work.request.prune else _variants(there) - work.packages.keys()
    leaving = (name for name in sorted(_variants(there) - left) if not _is_unchanged(work, name, there))
    # The variants of a backend have one API, so one of those that are replaced or removed is enough.
    compared = left | set({named_backend(name): name for name in leaving}.values())
    unlike: dict[tuple[str, ...], list[str]] = {}
    for name, package in sorted(_downloaded(work.repository, revision, compared).items()):
        alike = (built for built in work.packages.values() if built.backend == package.backend)
        newer = work.packages.get(name) or next(alike, None) or next(iter(work.packages.values()))
        if differences := package.differences(newer):
            unlike.setdefault(differences, []).append(name)
    where = f"{work.repository.repo_id}@{work.branch}"
    again = f"set `version = {work.project.version + 1}` in build.toml and build again"
    if any(left & set(names) for names in unlike.values()):
        listed = "".join(
            f"\n  {', '.join(names)}:" + "".join(f"\n    {line}" for line in differences)
            for differences, names in unlike.items()
        )
        raise HubError(
            f"variants that stay on the branch have another API:{listed}",
            where=where,
            hint=f"{again}; or also publish these variants, or delete them with --prune",
        )
    changes = tuple(dict.fromkeys(line for differences in unlike for line in differences))
    breaking = [line for line in changes if breaks_callers(line)]
    if breaking and API_CHANGE not in work.request.allow:
        raise HubError(
            f"the API of version {work.project.version} would break its callers:"
            + "".join(f"\n  {line}" for line in breaking),
            where=where,
            hint=f"{again}; or publish it with --allow {API_CHANGE}",
        )
    return changes


def _variants(there: Mapping[str, RemoteFile]) -> set[str]:
    """Return the variants among the files of a branch."""
    return {path.split("/")[1] for path in there if path.startswith("build/") and path.count("/") > 1}


def _downloaded(repository: RemoteRepository, revision: str, names: Iterable[str]) -> dict[str, HubPackage]:
    """Download packages of a revision; the Hub's client caches them.

    Names that are not valid names of variants are skipped: they would be glob patterns here, and markup in the card.
    """
    names = sorted(name for name in names if re.fullmatch(r"[\w.+-]+", name, re.ASCII))
    if not names:
        return {}
    root = repository.download(revision, [f"build/{name}/*" for name in names])
    return {name: HubPackage(root / "build" / name) for name in names}


def _is_unchanged(work: _Publication, name: str, there: Mapping[str, RemoteFile]) -> bool:
    """Return whether the branch has the local package. Its metadata holds the digests of all other files."""
    path = f"build/{name}/metadata.json"
    return path in work.contents and work.contents[path].is_in(there.get(path))


def _outdated(work: _Publication, there: Mapping[str, RemoteFile], removed: Sequence[str]) -> Iterator[str]:
    """Yield the files on the branch that this publication deletes."""
    for path in there:
        top, _, rest = path.partition("/")
        variant, _, name = rest.partition("/")
        if top != "build" or not name or path in work.contents:
            continue
        # A signature stays valid as long as the signed metadata is unchanged.
        signature = name == SIGNATURE and variant in work.packages and _is_unchanged(work, variant, there)
        if variant in removed or (variant in work.packages and not signature):
            yield path
