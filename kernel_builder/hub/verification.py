"""Verification of published kernels: digests, signatures, provenance, and a comparison with a new build."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder import checks, pipeline
from kernel_builder.checkouts import ForgedObjectError, committed_files, git_output
from kernel_builder.config import offered
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.steps.buildable import obstacle
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory
from kernel_format.metadata import PackageMetadata
from kernel_format.signatures import Signers, read_signers, signature_verdict
from kernel_format.tree_digest import hash_tree

if TYPE_CHECKING:
    from kernel_builder.progress import Progress
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class VariantVerdict:
    """The result for one variant.

    Attributes:
        variant: The name of the variant.
        digest: Differences between the files and the digest in the metadata; empty if there are none.
        signature: `valid`, `none`, or what is wrong with it.
        provenance: The commit of the sources (`kernel`) and the builder (`kernel-builder`), as the metadata states.
        rebuilt: `equal`, `differs`, or why the variant was not built again. None if no new build was requested.
        differing: The files whose bytes differ from those of the new build.
    """

    variant: str
    digest: tuple[str, ...]
    signature: str
    provenance: Mapping[str, Mapping[str, Any]]
    rebuilt: str | None = None
    differing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all checks passed. A missing signature passes."""
        return not self.digest and not self.differing and self.signature in ("valid", "none")


@dataclass(frozen=True)
class Verification:
    """The results for all variants of a revision."""

    repo_id: str
    revision: str
    variants: tuple[VariantVerdict, ...]

    @property
    def ok(self) -> bool:
        """Whether all checks of all variants passed."""
        return all(verdict.ok for verdict in self.variants)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {
            "repo-id": self.repo_id,
            "revision": self.revision,
            "ok": self.ok,
            "variants": [{**asdict(verdict), "ok": verdict.ok} for verdict in self.variants],
        }


def verify(
    name: str,
    *,
    source: Path | None = None,
    signers: Sequence[str] = (),
    require_signature: bool = False,
    progress: Progress | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Verification:
    """Download a published kernel and check it.

    Args:
        name: `ORG/NAME` for the newest version, or `ORG/NAME@REVISION`.
        source: The directory of the kernel's project, to build the variants again and compare. In a git repository,
            each variant is built at the commit that it names; otherwise from the files as they are.
        signers: Who may have signed: workflows, as `https://github.com/ORG/REPO/.github/workflows/FILE@REF`, and files
            with public keys. Empty: the workflows that the public client trusts.
        require_signature: Fail variants without a signature.
        progress: Receives reports about downloads of toolchains, and the steps of new builds.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
        VerificationError: If the revision has no packages, or a signer is malformed.
        KernelBuilderError: If `source` cannot be built.
    """
    trusted = read_signers(signers)
    repo_id, _, revision = name.partition("@")
    repository = RemoteRepository(repo_id, endpoint=endpoint, token=token)
    revision = _commit(repository, revision or None)
    with temporary_directory() as temporary:
        root = temporary / "published"
        files = {path: remote for path, remote in repository.files(revision).items() if path.startswith("build/")}
        repository.download_into(root, revision, files)
        packages = sorted(path for path in (root / "build").glob("[!.]*") if path.is_dir())
        if not packages:
            raise VerificationError(
                "the revision has no packages",
                where=f"{repo_id}@{revision}",
                hint="packages are on the branch of their version: ORG/NAME@v1",
            )
        verdicts = [_verdict(package, trusted, require_signature) for package in packages]
        if source is not None:
            verdicts = _rebuild(verdicts, root / "build", source, repo_id.partition("/")[0], temporary, progress)
    return Verification(repo_id, revision, tuple(verdicts))


def _commit(repository: RemoteRepository, revision: str | None) -> str:
    """Return the commit of a revision, or of the newest version."""
    branches = repository.branches()
    versions = [int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)]
    if revision is None:
        if not versions:
            raise HubError(
                "there is no such kernel, or it has no version",
                where=f"{repository.repo_id} on {repository.api.endpoint}",
                hint="check the name, the token with `hf auth whoami`, and $HF_ENDPOINT",
            )
        revision = f"v{max(versions)}"
    return branches.get(revision, revision)


def _verdict(package: Path, signers: Signers, require_signature: bool) -> VariantVerdict:
    report = checks.run(package, only=("digest",))
    wrong = tuple(f"{f.path} {f.message}" for f in report.findings) or tuple(report.skipped.values())
    metadata = PackageMetadata.read(package) or PackageMetadata()
    recorded = {part: metadata.origin(part) for part in ("kernel", "kernel-builder")}
    signature = signature_verdict(package, signers)
    if signature == "none" and require_signature:
        signature = "missing, but required"
    return VariantVerdict(package.name, wrong, signature, recorded)


def _rebuild(
    verdicts: Sequence[VariantVerdict],
    published: Path,
    source: Path,
    owner: str,
    temporary: Path,
    progress: Progress | None,
) -> list[VariantVerdict]:
    """Build the variants that this machine can build again, with an empty cache, and compare them."""
    groups: dict[str | None, list[VariantVerdict]] = {}
    repository = _git_repository(source)
    for verdict in verdicts:
        commit = verdict.provenance["kernel"].get("commit")
        groups.setdefault(commit if repository else None, []).append(verdict)
    done: dict[str, VariantVerdict] = {}
    for number, (commit, group) in enumerate(groups.items()):
        directory = source
        if progress:
            at = f" at commit {commit[:12]}" if commit else ""
            progress.say(f"[{number + 1}/{len(groups)}] building {counted(len(group), 'variant')} again{at}")
        if repository and commit:
            try:
                directory = _checkout(repository, commit, temporary / f"source-{number}")
            except VerificationError as error:
                done |= {verdict.variant: replace(verdict, rebuilt=f"not built: {error}") for verdict in group}
                continue
        compared = _build_and_compare(group, published, directory, owner, temporary / f"built-{number}", progress)
        done |= {verdict.variant: verdict for verdict in compared}
    return [done[verdict.variant] for verdict in verdicts]


def _git_repository(source: Path) -> tuple[Path, str] | None:
    """Return the root of the git repository around a directory, and the directory's path in it, if there is one."""
    try:
        answer = git_output(source, "rev-parse", "--show-toplevel", "--show-prefix")
    except FileNotFoundError:
        return None
    if answer is None:
        return None
    top, prefix = os.fsdecode(answer).split("\n")[:2]
    return Path(top), prefix


def _checkout(repository: tuple[Path, str], commit: str, target: Path) -> Path:
    """Write the project as a commit has it to a new directory, which leaves the user's files alone."""
    top, prefix = repository
    try:
        with committed_files(top, commit) as committed:
            committed.write(target)
    except (ForgedObjectError, OSError) as error:
        raise VerificationError(
            f"the commit {commit[:12]} cannot be checked out: {error}",
            where=str(top),
            hint="fetch the commit that the package names into this repository",
        ) from error
    (target / ".git").mkdir()  # links may lead to all of the repository
    return target / prefix


def _build_and_compare(
    verdicts: Sequence[VariantVerdict],
    published: Path,
    source: Path,
    owner: str,
    target: Path,
    progress: Progress | None,
) -> list[VariantVerdict]:
    fresh = _fresh(target / "cache", progress)
    reasons: dict[str, str] = {}
    project = read_project(source)
    for verdict in verdicts:
        its = (PackageMetadata.read(published / verdict.variant) or PackageMetadata()).python_name
        if its and its != project.python_name:
            reasons[verdict.variant] = f"not built: --source has the kernel {project.python_name}, not {its}"
            continue
        try:
            variant = Variant.parse(verdict.variant)
            offered.check_offered(project, variant)
        except KernelBuilderError as error:
            reasons[verdict.variant] = f"not built: {error}"
            continue
        if missing := obstacle(project, variant, fresh):
            reasons[verdict.variant] = f"not built: {missing.reason}"
        elif other := _other_way(published / verdict.variant, variant):
            reasons[verdict.variant] = f"not built: {other}"
    names = tuple(verdict.variant for verdict in verdicts if verdict.variant not in reasons)
    if names:
        # Without loading: whether this machine can run the packages does not matter for the comparison.
        metadata = [PackageMetadata.read(published / name) or PackageMetadata() for name in names]
        allow = tuple(
            {check for package in metadata for check in package.allowed_checks}.intersection(checks.ALLOWABLE)
        )
        # A package that loads other kernels of its owner was built for that owner.
        loaded = {depend.get("repo-id") for package in metadata for depend in package.kernel_depends}
        request = pipeline.BuildRequest(
            directories=(source,),
            variants=names,
            out=target / "build",
            owner=owner if loaded & set(read_project(source, owner).renamed.values()) else None,
            load=False,
            allow=allow,
        )
        pipeline.build(request, fresh, progress).raise_error()
    return [
        replace(verdict, rebuilt=reasons[verdict.variant])
        if verdict.variant in reasons
        else _compared(verdict, published / verdict.variant, target / "build" / verdict.variant)
        for verdict in verdicts
    ]


def _other_way(package: Path, variant: Variant) -> str | None:
    """Return why a new build here has other bytes: one of the two builds is cross-compiled, the other is not."""
    was_crossed = (PackageMetadata.read(package) or PackageMetadata()).is_cross_compiled
    if was_crossed == (variant.platform not in (None, this_platform())):
        return None
    if was_crossed:
        return f"it was cross-compiled, and this machine is {this_platform()}; verify it on another platform"
    return f"it was compiled on a machine that is {variant.platform}; verify it on one"


def _fresh(cache: Path, progress: Progress | None) -> Toolchains:
    """Return the user's toolchains with an empty build cache."""
    from kernel_builder.toolchain import Toolchains

    store = Toolchains().store.root
    store.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "toolchains").symlink_to(store, target_is_directory=True)
    return Toolchains(cache=cache, progress=progress)


def _compared(verdict: VariantVerdict, published: Path, built: Path) -> VariantVerdict:
    """Compare two packages. The provenance in the metadata may differ, since it names the builder."""
    first, second = hash_tree(published).files, hash_tree(built).files
    differing = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if "metadata.json" in differing and _without_provenance(published) == _without_provenance(built):
        differing.remove("metadata.json")
    return replace(verdict, rebuilt="differs" if differing else "equal", differing=tuple(differing))


def _without_provenance(package: Path) -> object:
    """Return the JSON of a package's metadata without its provenance. Unknown keys are kept, so they are compared."""
    try:
        described = json.loads((package / "metadata.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return {**described, "provenance": None} if isinstance(described, dict) else described
