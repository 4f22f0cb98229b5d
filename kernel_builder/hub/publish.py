"""A project and its packages -> a repository on a Hub: builds on the branch of their version, sources and card on main.

Nothing is sent before every check has passed. The builds are one commit, made on the branch as it was read: if it has
moved meanwhile, everything is thought through again. What is there already is not sent again, so that a publication
that was cut off ends the same when it is started again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_builder import checks
from kernel_builder import project as projects
from kernel_builder.errors import CheckError, ConfigError, HubError, PackageError
from kernel_builder.hub import card
from kernel_builder.hub.api import Api, loaded, read
from kernel_builder.hub.repository import Commit, Conflict, Content, RemoteFile, Repository
from kernel_builder.package import SIGNATURE
from kernel_builder.project import Project
from kernel_builder.variant import BACKENDS

_ATTEMPTS = 5
# What Hubs put into a repository themselves.
_HUBS_OWN = (".gitattributes",)


@dataclass(frozen=True)
class Request:
    """What to publish, and where.

    Attributes:
        directory: The project; its packages are in `build`.
        repo_id: None for that of `[general.hub]`.
        branch: None for that of `[general.hub]`, or else `v<version>`.
        private: Make the repository a private one, if it is new.
        create_pr: Open pull requests instead of committing.
        prune: Remove the variants on the branch that are not among the packages.
        dry_run: Do everything but write.
        message: The commits' first line.
        load: Load each package that this machine can load, as a check.
        endpoint: Address of the Hub. None: where the Hub's own tools find it.
        token: None: where they find it.
    """

    directory: Path
    repo_id: str | None = None
    branch: str | None = None
    private: bool = False
    create_pr: bool = False
    prune: bool = False
    dry_run: bool = False
    message: str | None = None
    load: bool = True
    endpoint: str | None = None
    token: str | None = None


class Listener:
    """Told how a publication goes along. The default says nothing."""

    def say(self, message: str) -> None:
        """Something a person would want to know, one line."""


@dataclass(frozen=True)
class Change:
    """What brings one branch to what it should be.

    Attributes:
        add: Path in the repository -> what to send.
        size: Bytes of the different contents among them.
        unchanged: How many files are there already.
        delete: Paths to remove.
    """

    add: Mapping[str, Content]
    size: int
    unchanged: int
    delete: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.add or self.delete)


@dataclass(frozen=True)
class Written:
    """What was, or would be, done to one branch. `revision` and `url` are those of a commit, if one was made."""

    branch: str
    sent: tuple[str, ...] = ()
    bytes: int = 0
    unchanged: int = 0
    removed: tuple[str, ...] = ()
    revision: str | None = None
    url: str | None = None
    pull_request: str | None = None


@dataclass(frozen=True)
class Published:
    """What a publication did.

    Attributes:
        variants: The variants published, and whether each was built from committed sources only.
        kept: Variants on the branch that this publication leaves as they are.
        removed: Variants that it removes.
        dirty: Of `variants` and `kept`, those built from sources, or by a builder, that no commit has.
        api_changes: How the API differs from that of the variants that were on the branch.
        builds, main: What was done to the two branches. `main` is None if it belongs to a newer version.
        note: Why `main` was left as it is.
    """

    repo_id: str
    endpoint: str
    url: str
    version: int
    dry_run: bool
    created: bool
    variants: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    dirty: tuple[str, ...]
    api_changes: tuple[str, ...]
    builds: Written
    main: Written | None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The result as `--output-json` prints it."""

        def spelled(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key.replace("_", "-"): value for key, value in fields}

        return asdict(self, dict_factory=spelled)


@dataclass(frozen=True)
class _Packages:
    """The packages of one project that have passed their checks."""

    project: Project
    directories: Mapping[str, Path]
    metadata: Mapping[str, Mapping[str, Any]]
    api: Mapping[str, Api]
    files: Mapping[str, Content]
    loadable: tuple[str, ...]

    @cached_property
    def spoken_api(self) -> Api:
        """The API as the module itself tells it, where this machine can load a package, or else as its files do."""
        told = loaded(self.directories[self.loadable[0]]) if self.loadable else None
        return told or next(iter(self.api.values()))

    @cached_property
    def compilers(self) -> Mapping[str, str]:
        """What the compilers of the binaries call themselves."""
        told = {n: card.compiler_of(binary) for n, path in self.directories.items() for binary in path.glob("*.so")}
        return {name: compiler for name, compiler in told.items() if compiler}


def publish(request: Request, listener: Listener | None = None) -> Published:
    """Check the packages of a project and publish them.

    Raises:
        ConfigError: If `build.toml` is wrong, or there is no repository to publish to.
        CheckError: If there is no package, or one does not pass its checks.
        PackageError: If the packages are not all of this project, this version and one API.
        HubError: If the Hub refuses, or the version rule does.
    """
    listener = listener or Listener()
    project = projects.read(request.directory)
    repo_id = request.repo_id or project.hub_repo_id
    if not repo_id:
        raise ConfigError(
            "there is no repository to publish to",
            where=f"{project.root / 'build.toml'}: [general.hub] repo-id",
            hint='add repo-id = "organisation/name" there, or give --repo-id',
        )
    branch = request.branch or project.hub_branch or f"v{project.version}"
    _check_branch(branch, project)
    repository = Repository(repo_id, endpoint=request.endpoint, token=request.token)
    if not request.dry_run:
        repository.require_token()
    packages = _read(project, listener, load=request.load)

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
    branches = repository.branches()
    if branch not in branches and not request.dry_run:
        repository.create_branch(branch)

    for _ in range(_ATTEMPTS):
        try:
            return _write(repository, branch, packages, request, listener, created=private is None)
        except Conflict as error:
            conflict = error
            listener.say(f"{branch} has moved meanwhile; looking at it again")
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


def _read(project: Project, listener: Listener, *, load: bool) -> _Packages:
    """The packages of a project, checked."""
    build = project.root / "build"
    directories = {path.name: path for path in sorted(build.glob("[!.]*")) if path.is_dir()}
    if not directories:
        raise CheckError(
            "there is no package to publish", where=str(build), hint=f"build it: kernel-builder build {project.root}"
        )
    findings: list[str] = []
    loadable: list[str] = []
    for name, directory in directories.items():
        listener.say(f"checking {name}")
        report = checks.run(directory, load=load)
        loadable += [name] * ("load" in report.passed)
        findings += [f"{name}/{f.path}: {f.message} [{f.check}]" for f in report.findings if f.severity == "error"]
    if findings:
        raise CheckError(
            "nothing is published, since packages do not pass their checks:\n  " + "\n  ".join(findings),
            where=str(build),
            hint=f"kernel-builder check-builds {project.root} has more; then build again",
        )
    metadata = {name: json.loads((path / "metadata.json").read_bytes()) for name, path in directories.items()}
    for name, described in metadata.items():
        for key, expected in (("name", project.name), ("version", project.version), ("license", project.license)):
            if described[key] != expected:
                raise PackageError(
                    f"`{key}` is {described[key]!r}, in build.toml it is {expected!r}",
                    where=str(directories[name] / "metadata.json"),
                    hint=f"build again: kernel-builder build {project.root}",
                )
    files = {
        f"build/{name}/{path.relative_to(directory).as_posix()}": Content(path)
        for name, directory in directories.items()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    apis = {name: read(directory) for name, directory in directories.items()}
    found = _Packages(project, directories, metadata, apis, files, tuple(loadable))
    first = next(iter(directories))
    for name, directory in directories.items():
        differences = _differences(found, name, found.api[first], metadata[first]["backend"]["type"])
        if differences:
            raise PackageError(
                f"its API is not that of {first}:\n  " + "\n  ".join(differences),
                where=str(directory),
                hint=f"one of them is of other sources; build again: kernel-builder build {project.root}",
            )
    return found


def _differences(packages: _Packages, name: str, older: Api, backend: str) -> tuple[str, ...]:
    """How the API of the package `name` differs from another one.

    Backends may have operators of their own: between two of them, only those that both have are compared.
    """
    newer = packages.api[name]
    if packages.metadata[name]["backend"]["type"] != backend:
        both = older.ops.keys() & newer.ops.keys()
        older = replace(older, ops={op: older.ops[op] for op in both})
        newer = replace(newer, ops={op: newer.ops[op] for op in both})
    return older.differences(newer)


def _write(
    repository: Repository, branch: str, packages: _Packages, request: Request, listener: Listener, *, created: bool
) -> Published:
    """Bring both branches, as they are now, to what they should be."""
    project = packages.project
    heads = repository.branches()
    there = repository.files(heads[branch]) if branch in heads else {}
    old = {path.split("/")[1] for path in there if path.startswith("build/") and path.count("/") > 1}
    others = sorted(old - packages.directories.keys())
    kept, removed = ([], others) if request.prune else (others, [])
    kept_metadata: dict[str, Mapping[str, Any]] = {}
    changes: tuple[str, ...] = ()
    if old:
        changes = _check_version(repository, heads[branch], packages, there, old, kept)
        kept_metadata = _metadata_of(repository, heads[branch], kept)

    builds = _write_branch(
        repository,
        branch,
        heads.get(branch),
        _change(packages.files, there, _superseded(there, packages, removed)),
        request,
        f"Build of {project.name} {project.version}",
        listener,
    )

    newest = max((int(name[1:]) for name in heads if name[0] == "v" and name[1:].isdecimal()), default=0)
    note = None
    if branch != f"v{project.version}":
        note = f"main is left as it is: {branch} is not the branch of a version"
    elif newest > project.version:
        note = f"main is left as it is: it is of version {newest}"
    described = {**kept_metadata, **packages.metadata}
    main = None
    if note is None:
        sizes = dict.fromkeys(described, 0)
        for path, file in there.items():
            if path.split("/")[0] == "build" and path.count("/") > 1 and path.split("/")[1] in kept_metadata:
                sizes[path.split("/")[1]] += file.size
        for path, content in packages.files.items():
            sizes[path.split("/")[1]] += content.size
        text = card.render(
            project,
            repository.repo_id,
            metadata=described,
            sizes=sizes,
            compilers=packages.compilers,
            api=packages.spoken_api,
        )
        sources = {**_sources(project.root), "README.md": Content(text.encode())}
        on_main = repository.files(heads["main"]) if "main" in heads else {}
        main = _write_branch(
            repository,
            "main",
            heads.get("main"),
            _change(sources, on_main, _outdated_sources(on_main, sources)),
            request,
            f"Sources and card of {project.name} {project.version}",
            listener,
        )
    return Published(
        repo_id=repository.repo_id,
        endpoint=repository.api.endpoint,
        url=repository.url,
        version=project.version,
        dry_run=request.dry_run,
        created=created,
        variants=tuple(packages.directories),
        kept=tuple(kept),
        removed=tuple(removed),
        dirty=tuple(name for name, described in sorted(described.items()) if card.is_dirty(described)),
        api_changes=changes,
        builds=builds,
        main=main,
        note=note,
    )


def _write_branch(
    repository: Repository,
    branch: str,
    head: str | None,
    change: Change,
    request: Request,
    message: str,
    listener: Listener,
) -> Written:
    written = Written(branch, tuple(change.add), change.size, change.unchanged, change.delete)
    if not change or request.dry_run:
        return written
    if head is None:
        raise Conflict("was there a moment ago, and is gone", where=f"{repository.repo_id}@{branch}")
    listener.say(f"{branch}: sending {len(change.add)} files, {change.size / 2**20:.1f} MiB")
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


def _check_version(
    repository: Repository,
    revision: str,
    packages: _Packages,
    there: Mapping[str, RemoteFile],
    old: set[str],
    kept: Sequence[str],
) -> tuple[str, ...]:
    """Compare the API with that of the variants on the branch, and refuse to leave any of them with another one.

    Returns:
        How the API changes, where no variant is left behind.
    """
    unlike: dict[tuple[str, ...], list[str]] = {}
    for name in kept or sorted(old)[:1]:
        if name in packages.directories and _unchanged(packages, name, there):
            continue
        directory = repository.download(revision, [f"build/{name}/*"]) / "build" / name
        described = _metadata(directory)
        backend = described.get("backend", {}).get("type") or _backend(name)
        like = [n for n in packages.directories if packages.metadata[n]["backend"]["type"] == backend]
        nearest = name if name in packages.directories else next(iter([*like, *packages.directories]))
        differences = _differences(packages, nearest, read(directory), backend)
        if differences:
            unlike.setdefault(differences, []).append(name)
    if kept and unlike:
        version = packages.project.version
        told = "".join(
            f"\n  {', '.join(names)}:" + "".join(f"\n    {line}" for line in differences)
            for differences, names in unlike.items()
        )
        raise HubError(
            f"the API being published is not that of variants on the branch that would be left as they are:{told}",
            where=f"{repository.repo_id}@{revision[:12]}",
            hint=f"set `version = {version + 1}` in build.toml; or publish these variants too, or --prune them",
        )
    return tuple(dict.fromkeys(line for differences in unlike for line in differences))


def _unchanged(packages: _Packages, name: str, there: Mapping[str, RemoteFile]) -> bool:
    """Whether the package on the branch is the one at hand, as its list of digests says."""
    path = f"build/{name}/metadata.json"
    return packages.files[path].is_in(there.get(path))


def _backend(variant: str) -> str:
    """The backend of a variant whose metadata, of an older builder, does not name it."""
    return next((part for part in variant.split("-") if part in BACKENDS), "cuda")


def _metadata(directory: Path) -> dict[str, Any]:
    try:
        described = json.loads((directory / "metadata.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def _metadata_of(repository: Repository, revision: str, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    if not names:
        return {}
    root = repository.download(revision, [f"build/{name}/metadata.json" for name in names])
    return {name: _metadata(root / "build" / name) for name in names}


def _superseded(there: Mapping[str, RemoteFile], packages: _Packages, removed: Sequence[str]) -> Iterator[str]:
    """The files on the branch that must go."""
    if not any(path.startswith("build/") for path in there):
        # A new branch starts as a copy of main.
        yield from (path for path in there if path not in _HUBS_OWN)
        return
    for path in there:
        top, _, rest = path.partition("/")
        variant, _, name = rest.partition("/")
        if top != "build" or not name or path in packages.files:
            continue
        # A signature holds for as long as what it signs is the same.
        if variant in removed or (
            variant in packages.directories and not (name == SIGNATURE and _unchanged(packages, variant, there))
        ):
            yield path


def _change(wanted: Mapping[str, Content], there: Mapping[str, RemoteFile], delete: Iterator[str]) -> Change:
    add = {path: content for path, content in wanted.items() if not content.is_in(there.get(path))}
    sizes = {content.sha256: content.size for content in add.values()}
    return Change(add, sum(sizes.values()), len(wanted) - len(add), tuple(sorted(delete)))


def _sources(root: Path) -> dict[str, Content]:
    """The files of a project that its repository has on `main`: those that git does not ignore, where there is git.

    Hidden files, builds and bytecode are none of them.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
        listed = os.fsdecode(done.stdout).split("\0") if done.returncode == 0 else []
    except FileNotFoundError:
        listed = []
    names = [PurePosixPath(name) for name in listed if name] or [
        PurePosixPath(path.relative_to(root).as_posix()) for path in root.rglob("*")
    ]
    return {
        str(name): Content(root / name)
        for name in sorted(names)
        if (root / name).is_file()
        and (root / name).resolve().is_relative_to(root)
        and name.parts[0] != "build"
        and not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        and name.suffix != ".pyc"
    }


def _outdated_sources(there: Mapping[str, RemoteFile], sources: Mapping[str, Content]) -> Iterator[str]:
    """The files in directories of the project that the project no longer has; what else lies on main is not ours."""
    own = {path.partition("/")[0] for path in sources if "/" in path}
    return (path for path in there if "/" in path and path.partition("/")[0] in own and path not in sources)
