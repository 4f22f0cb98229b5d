"""Verification of published kernels: digests, signatures, provenance, and a comparison with a new build."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kernel_builder import checks, pipeline
from kernel_builder.checkouts import check_out, git_output
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import this_platform
from kernel_builder.hub.packages import HubPackage
from kernel_builder.hub.partial_download import package_files
from kernel_builder.hub.remote_repository import MAX_BYTES, RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.progress import Progress
from kernel_builder.steps import buildable
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory
from kernel_format.metadata import TEXT_BYTES, PackageMetadata
from kernel_format.signatures import (
    FOR_NO_REPOSITORY,
    UNVERIFIED,
    Signers,
    read_bundle,
    read_signers,
    refers_to_key,
    signature_verdict,
)
from kernel_format.tree_digest import SIGNATURE, bytecode, hash_tree

_MOST_KERNELS = 100  # that one kernel loads


@dataclass(frozen=True)
class VariantVerdict:
    """The result for one variant.

    Attributes:
        digest: Differences between the files and the digest in the metadata; empty if there are none.
        signature: `valid`, `none`, one of `UNVERIFIED`, or the error.
        provenance: The commit of the sources (`kernel`) and the builder (`kernel-builder`), from the metadata.
        loads: The other kernels that the client loads with the variant, as `ORG/NAME@REVISION`.
        rebuilt: `equal`, `differs`, or the reason why the variant was not rebuilt. None if no rebuild was requested.
        differing: The files whose bytes differ from the rebuilt ones.
    """

    variant: str
    digest: tuple[str, ...]
    signature: str
    provenance: Mapping[str, Mapping[str, Any]]
    loads: tuple[str, ...] = ()
    rebuilt: str | None = None
    differing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check failed. A missing signature passes."""
        return not self.digest and not self.differing and self.signature in ("valid", "none", *UNVERIFIED)

    @property
    def is_verified(self) -> bool:
        """Whether a requested rebuild has taken place, and the key and the repository of a signature are known."""
        return self.rebuilt in (None, "equal", "differs") and self.signature not in UNVERIFIED


@dataclass(frozen=True)
class Verification:
    """The results for all variants of a revision, and for the kernels that the client loads with them."""

    repo_id: str
    revision: str
    variants: tuple[VariantVerdict, ...]
    loads: tuple[Verification, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check of a variant failed."""
        return all(verdict.ok for verdict in self.variants) and all(kernel.ok for kernel in self.loads)

    @property
    def is_verified(self) -> bool:
        """Whether each variant is verified: a package's own claims cannot replace a rebuild or a key."""
        return all(of.is_verified for of in self.variants) and all(kernel.is_verified for kernel in self.loads)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {
            "repo-id": self.repo_id,
            "revision": self.revision,
            "ok": self.ok and self.is_verified,
            "variants": [{**asdict(verdict), "ok": verdict.ok and verdict.is_verified} for verdict in self.variants],
            "loads": [kernel.as_dict() for kernel in self.loads],
        }


def verify(
    name: str,
    *,
    source: Path | None = None,
    signers: Sequence[str] = (),
    require_signature: bool = False,
    progress: Progress | None = None,
    endpoint: str | None = None,
    max_size: float = MAX_BYTES / 1e9,
) -> Verification:
    """Download a published kernel and the kernels that it loads, and check them.

    Args:
        name: `ORG/NAME` for the newest version, or `ORG/NAME@REVISION`.
        source: The directory of the kernel's project, to rebuild the variants and compare. In a git repository, each
            variant is built at the commit that it names; otherwise from the current files.
        signers: Trusted signers: workflows, as `https://github.com/ORG/REPO/.github/workflows/FILE@REF`, and files with
            public keys. Empty: the workflows that the public client trusts.
        require_signature: Fail variants without a signature.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
        max_size: The most GB to download of each kernel.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
        VerificationError: If the revision has no packages or too large ones, or a signer is malformed.
        KernelBuilderError: If `source` cannot be built.
    """
    trusted = read_signers(signers)
    results: dict[str, Verification] = {}
    found = [name]
    for kernel in found:  # which grows
        if len(found) > _MOST_KERNELS:
            raise VerificationError(f"the kernel loads more than {_MOST_KERNELS} kernels", where=name)
        with temporary_directory() as temporary:
            result = _verify_one(kernel, trusted, require_signature, endpoint, temporary, int(max_size * 1e9))
            if source is not None and kernel == name:
                owner, published = result.repo_id.partition("/")[0], temporary / "build"
                verdicts = _rebuild(result.variants, published, source, owner, temporary, progress or Progress())
                result = replace(result, variants=tuple(verdicts))
        results[kernel] = result
        found += dict.fromkeys(load for verdict in result.variants for load in verdict.loads if load not in found)
    return replace(results.pop(name), loads=tuple(results.values()))


def _verify_one(
    name: str, trusted: Signers, require_signature: bool, endpoint: str | None, directory: Path, max_bytes: int
) -> Verification:
    """Download the packages of one kernel into an empty directory, and check them."""
    repo_id, _, asked = name.partition("@")
    repository = RemoteRepository(repo_id, endpoint=endpoint)
    revision, versions = find_revision(repository, asked)
    repository.download_into(directory, revision, package_files(repository, revision), max_bytes)
    packages = sorted(path for path in (directory / "build").glob("[!.]*") if path.is_dir())
    if not packages:
        raise VerificationError(
            "the revision has no packages",
            where=f"{repo_id}@{revision}",
            hint="packages are on the branch of their version: ORG/NAME@v1",
        )
    verdicts = [_verdict(package, trusted, require_signature, repo_id, versions) for package in packages]
    return Verification(repo_id, revision, tuple(verdicts))


def find_revision(repository: RemoteRepository, asked: str) -> tuple[str, set[str]]:
    """Return the commit of a revision, or of the newest version, and its versions.

    The name of a version is the only version, also as a tag; a commit has the versions of all branches that are at it.
    """
    branches = repository.branches()
    versions = {name: commit for name, commit in branches.items() if re.fullmatch(r"v(0|[1-9][0-9]*)", name)}
    if twins := [name for name in branches if re.fullmatch(r"v\s*[-+]?[\d_]+\s*", name) and name not in versions]:
        raise VerificationError(f"some clients read the branch {twins[0]} as a version", where=repository.repo_id)
    if not asked and not versions:
        raise HubError(
            "the kernel does not exist, or has no version",
            where=repository.where,
            hint="check the name, the token with `hf auth whoami`, and $HF_ENDPOINT",
        )
    asked = asked or max(versions, key=lambda name: int(name[1:]))
    commit = branches.get(asked, asked)
    named = re.fullmatch(r"(?:(?:refs/)?(?:heads|tags)/)?(v\d+)", asked)
    return commit, {named[1]} if named else {name for name, head in versions.items() if head == commit}


def signature_here(package: HubPackage, signers: Signers, repo_id: str | None, versions: set[str]) -> str:
    """Return the verdict on a signature. One that is valid for another repository, version or variant is not valid.

    Args:
        repo_id: The repository of the package; None for a package in a directory.
    """
    signature, place = signature_verdict(package.directory, signers), package.metadata.place
    if signature != "valid" or repo_id is None:
        return signature
    if place.get("repo-id") is None and (place or refers_to_key(read_bundle(package.directory / SIGNATURE))):
        return FOR_NO_REPOSITORY
    version = f"v{package.metadata.version}"
    if place and not (place == {"repo-id": repo_id, "variant": package.variant} and versions <= {version}):
        return f"valid for another place: {place.get('repo-id')} {version} {place.get('variant')}"
    return signature


def _verdict(
    directory: Path, signers: Signers, require_signature: bool, repo_id: str, versions: set[str]
) -> VariantVerdict:
    package = HubPackage(directory)
    signature = signature_here(package, signers, repo_id, versions)
    if require_signature and signature in ("none", *UNVERIFIED):
        signature = f"required, but {'missing' if signature == 'none' else signature}"
    differences = [*package.digest_differences, *(f"{path} is bytecode" for path in bytecode(directory))]
    depends = package.metadata.kernel_depends
    loads = tuple(f"{of.get('repo-id')}@{of.get('revision') or 'v' + str(of.get('version'))}" for of in depends)
    return VariantVerdict(package.variant, tuple(differences), signature, package.provenance, loads)


def _rebuild(
    verdicts: Sequence[VariantVerdict], published: Path, source: Path, owner: str, temporary: Path, progress: Progress
) -> list[VariantVerdict]:
    """Rebuild the variants that this machine can build, with an empty cache, and compare them."""
    groups: dict[str | None, list[VariantVerdict]] = {}
    repository = _git_repository(source)
    for verdict in verdicts:
        commit = verdict.provenance["kernel"].get("commit")
        groups.setdefault(commit if repository else None, []).append(verdict)
    results: dict[str, VariantVerdict] = {}
    for number, (commit, group) in enumerate(groups.items()):
        at = f" at commit {commit[:12]}" if commit else ""
        progress.say(f"[{number + 1}/{len(groups)}] rebuilding {counted(len(group), 'variant')}{at}")
        scratch = temporary / f"rebuilt-{number}"
        scratch.mkdir()
        try:
            directory = _checkout(repository, commit, scratch / "source") if repository and commit else source
        except VerificationError as error:
            results |= {verdict.variant: replace(verdict, rebuilt=f"not built: {error}") for verdict in group}
            continue
        for verdict in _build_and_compare(group, published, directory, owner, scratch, progress):
            results[verdict.variant] = verdict
    return [results[verdict.variant] for verdict in verdicts]


def _git_repository(source: Path) -> tuple[Path, str] | None:
    """Return the root of the git repository around a directory, and the directory's path in it, if there is one."""
    answer = git_output(source, "rev-parse", "--show-toplevel", "--show-prefix")
    if answer is None:
        return None
    top, prefix = os.fsdecode(answer).split("\n")[:2]
    return Path(top), prefix


def _checkout(repository: tuple[Path, str], commit: str, target: Path) -> Path:
    """Write the project at a commit to a new directory, so that the user's files stay unchanged."""
    top, prefix = repository
    if error := check_out(top, commit, target):
        raise VerificationError(
            f"cannot check out the commit {commit[:12]}: {error}",
            where=str(top),
            hint="fetch the commit that the package names into this repository",
        )
    return target / prefix


def _build_and_compare(
    verdicts: Sequence[VariantVerdict], published: Path, source: Path, owner: str, scratch: Path, progress: Progress
) -> Iterator[VariantVerdict]:
    project, fresh = read_project(source), _toolchains_with_empty_cache(scratch / "cache", progress)
    metadata = {verdict.variant: HubPackage(published / verdict.variant).metadata for verdict in verdicts}
    reasons = {name: reason for name, about in metadata.items() if (reason := _obstacle(project, name, about, fresh))}
    built = {name: about for name, about in metadata.items() if name not in reasons}
    if built:
        # A package that loads other kernels of its owner was built for that owner.
        loaded = {depend.get("repo-id") for about in built.values() for depend in about.kernel_depends}
        allowed = {check for about in built.values() for check in about.allowed_checks}
        request = pipeline.BuildRequest(
            directories=(source,),
            variants=tuple(built),
            out=scratch / "build",
            owner=owner if loaded & set(read_project(source, owner).renamed.values()) else None,
            load=False,  # the comparison does not need the packages to load on this machine
            allow=tuple(allowed.intersection(checks.ALLOWABLE)),
        )
        pipeline.build(request, fresh, progress).raise_error()
    for verdict in verdicts:
        if reason := reasons.get(verdict.variant):
            yield replace(verdict, rebuilt=f"not built: {reason}")
        else:
            yield _compared(verdict, published / verdict.variant, scratch / "build" / verdict.variant)


def _obstacle(project: Project, name: str, metadata: PackageMetadata, toolchains: Toolchains) -> str | None:
    """Return why this machine cannot rebuild a package from a project, or why a rebuild would have other bytes."""
    if metadata.python_name not in (None, project.python_name):
        return f"--source has the kernel {project.python_name}, not {metadata.python_name}"
    try:
        variant = buildable.named(project, name, toolchains)
    except KernelBuilderError as error:
        return str(error)
    if metadata.is_cross_compiled == (variant.platform not in (None, this_platform())):
        return None
    if metadata.is_cross_compiled:
        return f"it was cross-compiled, and this machine is {this_platform()}; verify it on another platform"
    return f"it was compiled on {variant.platform}; verify it on that platform"


def _toolchains_with_empty_cache(cache: Path, progress: Progress) -> Toolchains:
    """Return the user's toolchains with an empty build cache."""
    store = Toolchains().store.root
    store.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "toolchains").symlink_to(store, target_is_directory=True)
    return Toolchains(cache=cache, progress=progress)


def _compared(verdict: VariantVerdict, published: Path, built: Path) -> VariantVerdict:
    """Compare two packages. The provenance in the metadata may differ, because it names the builder."""
    first, second = hash_tree(published).files, hash_tree(built).files
    differing = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if "metadata.json" in differing and _without_provenance(published) == _without_provenance(built):
        differing.remove("metadata.json")
    return replace(verdict, rebuilt="differs" if differing else "equal", differing=tuple(differing))


def _without_provenance(package: Path) -> object:
    """Return the JSON of a package's metadata without its provenance; unknown keys are compared too."""
    try:
        file = package / "metadata.json"
        described = json.loads(file.read_bytes()) if file.stat().st_size <= TEXT_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return {**described, "provenance": None} if isinstance(described, dict) else described
