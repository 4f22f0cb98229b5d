"""A project and its packages -> a repository on a Hub: builds on the branch of their version, sources and card on main.

Nothing is sent before every check has passed. The builds are one commit, made on the branch as it was read: if it has
moved meanwhile, everything is thought through again. What is there already is not sent again, so that a publication
that was cut off ends the same when it is started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.errors import ConfigError, HubError
from kernel_builder.hub import card, card_figures, project_sources
from kernel_builder.hub.packages import Package, checked, spoken_api
from kernel_builder.hub.publication import Change, Listener, Published, Request, Written
from kernel_builder.hub.remote_repository import Commit, Conflict, Content, RemoteFile, Repository
from kernel_builder.package.tree_digest import SIGNATURE

_ATTEMPTS = 5
# What Hubs put into a repository themselves.
_HUBS_OWN = (".gitattributes",)


@dataclass(frozen=True)
class _Work:
    """A publication on its way."""

    request: Request
    project: Project
    packages: Mapping[str, Package]
    contents: Mapping[str, Content]
    repository: Repository
    branch: str
    listener: Listener


def publish(request: Request, listener: Listener | None = None) -> Published:
    """Check the packages of a project and publish them.

    Raises:
        ConfigError: If `build.toml` is wrong, or there is no repository to publish to.
        CheckError: If there is no package, or one does not pass its checks.
        PackageError: If the packages are not all of this project, this version and one API.
        HubError: If the Hub refuses, or the version rule does.
    """
    listener = listener or Listener()
    project = read_project(request.directory)
    repo_id = request.repo_id or project.hub_repo_id
    if not repo_id:
        raise ConfigError(
            "there is no repository to publish to",
            where=f"{project.root / 'build.toml'}: [general.hub] repo-id",
            hint='add repo-id = "organisation/name" there, or give --repo-id',
        )
    if repo_id.endswith("/"):
        repo_id += project.name
    branch = request.branch or project.hub_branch or f"v{project.version}"
    _check_branch(branch, project)
    repository = Repository(repo_id, endpoint=request.endpoint, token=request.token)
    if not request.dry_run:
        repository.require_write()
    packages = checked(project, listener.say, load=request.load)
    contents = {path: Content(file) for package in packages.values() for path, file in package.files.items()}
    work = _Work(request, project, packages, contents, repository, branch, listener)

    private = repository.is_private()
    if request.private and private is False:
        raise HubError(
            "exists and is public; --private is for new repositories",
            where=repository.url,
            hint="make it private in its settings, or leave --private out",
        )
    if private is None and not request.dry_run:
        listener.say(f"creating {repository.url}")
        repository.create(private=request.private)
        if repository.is_private() is None:
            raise HubError(
                "the Hub says that this name is taken, and has no kernel of this name that the token may see",
                where=repository.url,
                hint="is it a repository of another type, or somebody else's? give another name by --repo-id",
            )
    if branch not in repository.branches() and not request.dry_run:
        repository.create_branch(branch)

    builds, removed, changes = _settled(work, branch, _write_builds)
    main, kept, note = _settled(work, "main", _write_main)
    everything = {**packages, **kept}
    return Published(
        repo_id=repo_id,
        endpoint=repository.api.endpoint,
        url=repository.url,
        version=project.version,
        dry_run=request.dry_run,
        created=private is None,
        variants=tuple(packages),
        kept=tuple(sorted(kept)),
        removed=removed,
        dirty=tuple(sorted(name for name, package in everything.items() if package.is_dirty)),
        api_changes=changes,
        builds=builds,
        main=main,
        note=note,
    )


_Result = TypeVar("_Result")


def _settled(work: _Work, branch: str, write: Callable[[_Work], _Result]) -> _Result:
    """What `write` gives, which looks at the branch anew each time that another publisher was faster."""
    for _ in range(_ATTEMPTS):
        try:
            return write(work)
        except Conflict as error:
            conflict = error
            work.listener.say(f"{branch} has moved meanwhile; looking at it again")
    raise conflict


def _check_branch(branch: str, project: Project) -> None:
    number = branch[1:]
    if branch == "main":
        raise ConfigError(
            "main has the sources and the card; builds are on the branch of their version",
            where="--branch or [general.hub] branch",
            hint=f"leave it out for v{project.version}",
        )
    if branch.startswith("v") and number.isdecimal() and int(number) != project.version:
        raise ConfigError(
            f"the branch is for version {number}, the project is version {project.version}",
            where="--branch or [general.hub] branch",
            hint="set `version` in build.toml and build again, or leave the branch out",
        )


def _write_builds(work: _Work) -> tuple[Written, tuple[str, ...], tuple[str, ...]]:
    """Bring the branch of the builds to what it should be.

    Returns:
        What was done, the variants that were removed, and how the API changes.
    """
    heads = work.repository.branches()
    there = work.repository.files(heads[work.branch]) if work.branch in heads else {}
    others = sorted(_variants(there) - work.packages.keys())
    removed = others if work.request.prune else []
    changes = _check_version(work, heads[work.branch], there) if _variants(there) else ()
    superseded = list(_superseded(work, there, removed))
    if not _variants(there) and work.branch == f"v{work.project.version}" and "main" in heads:
        # The new branch of a version starts as a copy of main.
        on_main = work.repository.files(heads["main"])
        superseded += [path for path, file in there.items() if path not in _HUBS_OWN and on_main.get(path) == file]
    change = _change(work.contents, there, superseded)
    message = f"Build of {work.project.name} {work.project.version}"
    return _write_branch(work, work.branch, heads.get(work.branch), change, message), tuple(removed), changes


def _write_main(work: _Work) -> tuple[Written | None, Mapping[str, Package], str | None]:
    """Bring main to what it should be, after the builds.

    Returns:
        What was done, the packages on the branch of the builds that are not of this publication, and why main is left
        as it is, if it is.
    """
    project, repository = work.project, work.repository
    heads = repository.branches()
    there = repository.files(heads[work.branch]) if work.branch in heads else {}
    kept: Mapping[str, Package] = {}
    if not work.request.prune and _variants(there):
        kept = _downloaded(repository, heads[work.branch], _variants(there) - work.packages.keys())
    newest = max((int(name[1:]) for name in heads if name[0] == "v" and name[1:].isdecimal()), default=0)
    if work.branch != f"v{project.version}":
        return None, kept, f"main is left as it is: {work.branch} is not the branch of a version"
    if newest > project.version:
        return None, kept, f"main is left as it is: it is of version {newest}"
    text = card.render(
        project, repository.repo_id, {**work.packages, **kept}, spoken_api(work.packages), work.request.card_note
    )
    runs = {path: Content(file) for run in card_figures.find(project) for path, file in run.files.items()}
    wanted = {**project_sources.of(project.root), **runs, "README.md": Content(text.encode())}
    on_main = repository.files(heads["main"]) if "main" in heads else {}
    change = _change(wanted, on_main, project_sources.outdated(on_main, wanted))
    message = f"Sources and card of {project.name} {project.version}"
    return _write_branch(work, "main", heads.get("main"), change, message), kept, None


def _write_branch(work: _Work, branch: str, head: str | None, change: Change, message: str) -> Written:
    request, repository = work.request, work.repository
    written = Written(branch, tuple(change.add), change.size, change.unchanged, change.delete)
    if not change or request.dry_run:
        return written
    if head is None:
        raise Conflict("was there a moment ago, and is gone", where=f"{repository.repo_id}@{branch}")
    work.listener.say(f"{branch}: sending {len(change.add)} files, {change.size / 2**20:.1f} MiB")
    done = repository.commit(
        branch,
        head,
        add=change.add,
        delete=change.delete,
        message=request.message or message,
        create_pr=request.create_pr,
    )
    if not request.create_pr:
        _check_arrived(repository, done, change)
    return replace(written, revision=done.revision, url=done.url, pull_request=done.pull_request)


def _check_arrived(repository: Repository, done: Commit, change: Change) -> None:
    """Whether the commit has what was sent: a Hub leaves out what a `.gitignore` in the repository names."""
    there = repository.files(done.revision)
    lost = [path for path, content in change.add.items() if not content.is_in(there.get(path))]
    if lost:
        raise HubError(
            f"the commit lacks {len(lost)} of the files sent, the first is {lost[0]}",
            where=f"{repository.repo_id}@{done.revision}",
            hint="remove the .gitignore of the repository, if it has one, and run the same command again",
        )


def _check_version(work: _Work, revision: str, there: Mapping[str, RemoteFile]) -> tuple[str, ...]:
    """Compare the API with that of the variants on the branch, and refuse to leave any of them with another one.

    Returns:
        How the API changes, where no variant is left behind.
    """
    left = set() if work.request.prune else _variants(there) - work.packages.keys()
    # Where none is left, one of those that go is enough to tell what changes.
    compared = left or {
        name for name in sorted(_variants(there) & work.packages.keys())[:1] if not _is_there(work, name, there)
    }
    unlike: dict[tuple[str, ...], list[str]] = {}
    for name, package in sorted(_downloaded(work.repository, revision, compared).items()):
        alike = (one for one in work.packages.values() if one.backend == package.backend)
        newer = work.packages.get(name) or next(alike, None) or next(iter(work.packages.values()))
        if differences := package.differences(newer):
            unlike.setdefault(differences, []).append(name)
    if left and unlike:
        told = "".join(
            f"\n  {', '.join(names)}:" + "".join(f"\n    {line}" for line in differences)
            for differences, names in unlike.items()
        )
        raise HubError(
            f"the API being published is not that of variants on the branch that would be left as they are:{told}",
            where=f"{work.repository.repo_id}@{work.branch}",
            hint=f"set `version = {work.project.version + 1}` in build.toml and build again; "
            "or publish these variants too, or remove them with --prune",
        )
    return tuple(dict.fromkeys(line for differences in unlike for line in differences))


def _variants(there: Mapping[str, RemoteFile]) -> set[str]:
    """The variants among the files of a branch."""
    return {path.split("/")[1] for path in there if path.startswith("build/") and path.count("/") > 1}


def _downloaded(repository: Repository, revision: str, names: Iterable[str]) -> dict[str, Package]:
    """Packages of a revision; the Hub's cache has what was downloaded before."""
    names = sorted(names)
    if not names:
        return {}
    root = repository.download(revision, [f"build/{name}/*" for name in names])
    return {name: Package(root / "build" / name) for name in names}


def _is_there(work: _Work, name: str, there: Mapping[str, RemoteFile]) -> bool:
    """Whether the package on the branch is the one at hand, as its metadata with all digests says."""
    path = f"build/{name}/metadata.json"
    return work.contents[path].is_in(there.get(path))


def _superseded(work: _Work, there: Mapping[str, RemoteFile], removed: Sequence[str]) -> Iterator[str]:
    """The files on the branch that must go."""
    for path in there:
        top, _, rest = path.partition("/")
        variant, _, name = rest.partition("/")
        if top != "build" or not name or path in work.contents:
            continue
        # A signature holds for as long as what it signs is the same.
        signature = name == SIGNATURE and variant in work.packages and _is_there(work, variant, there)
        if variant in removed or (variant in work.packages and not signature):
            yield path


def _change(wanted: Mapping[str, Content], there: Mapping[str, RemoteFile], delete: Iterable[str]) -> Change:
    add = {path: content for path, content in wanted.items() if not content.is_in(there.get(path))}
    sizes = {content.sha256: content.size for content in add.values()}
    return Change(add, sum(sizes.values()), len(wanted) - len(add), tuple(sorted(delete)))
