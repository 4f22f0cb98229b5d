"""Verification of published kernels: digests, signatures, provenance, and a comparison with a new build."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kernel_builder import checks, pipeline
from kernel_builder.checkouts import check_out, git_output
from kernel_builder.config import offered
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant, this_platform
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.plural import counted
from kernel_builder.progress import Progress
from kernel_builder.steps.buildable import obstacle
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import HubError, KernelBuilderError, VerificationError
from kernel_format.files import temporary_directory
from kernel_format.metadata import PackageMetadata
from kernel_format.signatures import Signers, read_signers, signature_verdict
from kernel_format.tree_digest import hash_tree


@dataclass(frozen=True)
class VariantVerdict:
    """The result for one variant.

    Attributes:
        variant: The name of the variant.
        digest: Differences between the files and the digest in the metadata; empty if there are none.
        signature: `valid`, `none`, or the error.
        provenance: The commit of the sources (`kernel`) and the builder (`kernel-builder`), from the metadata.
        rebuilt: `equal`, `differs`, or the reason why the variant was not rebuilt. None if no rebuild was requested.
        differing: The files whose bytes differ from the rebuilt ones.
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
        source: The directory of the kernel's project, to rebuild the variants and compare. In a git repository, each
            variant is built at the commit that it names; otherwise from the current files.
        signers: Trusted signers: workflows, as `https://github.com/ORG/REPO/.github/workflows/FILE@REF`, and files with
            public keys. Empty: the workflows that the public client trusts.
        require_signature: Fail variants without a signature.
        progress: Receives messages about toolchain downloads and rebuilds.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
        token: The token. None: `$HF_TOKEN`, or else the token of `hf auth login`.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
        VerificationError: If the revision has no packages, or a signer is malformed.
        KernelBuilderError: If `source` cannot be built.
    """
    trusted = read_signers(signers)
    repo_id, _, revision = name.partition("@")
    repository = RemoteRepository(repo_id, endpoint=endpoint, token=token)
    revision = newest_commit(repository, revision or None)
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


def newest_commit(repository: RemoteRepository, revision: str | None) -> str:
    """Return the commit of a revision, or of the newest version."""
    branches = repository.branches()
    versions = [int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)]
    if revision is None:
        if not versions:
            raise HubError(
                "the kernel does not exist, or has no version",
                where=f"{repository.repo_id} on {repository.api.endpoint}",
                hint="check the name, the token with `hf auth whoami`, and $HF_ENDPOINT",
            )
        revision = f"v{max(versions)}"
    return branches.get(revision, revision)


def _verdict(package: Path, signers: Signers, require_signature: bool) -> VariantVerdict:
    report = checks.run(package, only=("digest",))
    differences = tuple(f"{f.path} {f.message}" for f in report.findings) or tuple(report.skipped.values())
    metadata = PackageMetadata.read(package) or PackageMetadata()
    recorded = {part: metadata.origin(part) for part in ("kernel", "kernel-builder")}
    signature = signature_verdict(package, signers)
    if signature == "none" and require_signature:
        signature = "missing, but required"
    return VariantVerdict(package.name, differences, signature, recorded)


def _rebuild(
    verdicts: Sequence[VariantVerdict],
    published: Path,
    source: Path,
    owner: str,
    temporary: Path,
    progress: Progress | None,
) -> list[VariantVerdict]:
    """Rebuild the variants that this machine can build, with an empty cache, and compare them."""
    groups: dict[str | None, list[VariantVerdict]] = {}
    repository = _git_repository(source)
    for verdict in verdicts:
        commit = verdict.provenance["kernel"].get("commit")
        groups.setdefault(commit if repository else None, []).append(verdict)
    results: dict[str, VariantVerdict] = {}
    for number, (commit, group) in enumerate(groups.items()):
        directory = source
        if progress:
            at = f" at commit {commit[:12]}" if commit else ""
            progress.say(f"[{number + 1}/{len(groups)}] rebuilding {counted(len(group), 'variant')}{at}")
        if repository and commit:
            try:
                directory = _checkout(repository, commit, temporary / f"source-{number}")
            except VerificationError as error:
                results |= {verdict.variant: replace(verdict, rebuilt=f"not built: {error}") for verdict in group}
                continue
        compared = _build_and_compare(group, published, directory, owner, temporary / f"built-{number}", progress)
        results |= {verdict.variant: verdict for verdict in compared}
    return [results[verdict.variant] for verdict in verdicts]


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
    """Write the project at a commit to a new directory, so that the user's files stay unchanged."""
    top, prefix = repository
    if error := check_out(top, commit, target):
        raise VerificationError(
            f"cannot check out the commit {commit[:12]}: {error}",
            where=str(top),
            hint="fetch the commit that the package names into this repository",
        )
    (target / ".git").mkdir()  # symbolic links may point to files of the whole repository
    return target / prefix


def _build_and_compare(
    verdicts: Sequence[VariantVerdict],
    published: Path,
    source: Path,
    owner: str,
    target: Path,
    progress: Progress | None,
) -> list[VariantVerdict]:
    fresh = _toolchains_with_empty_cache(target / "cache", progress)
    reasons: dict[str, str] = {}
    project = read_project(source)
    for verdict in verdicts:
        name = (PackageMetadata.read(published / verdict.variant) or PackageMetadata()).python_name
        if name and name != project.python_name:
            reasons[verdict.variant] = f"not built: --source has the kernel {project.python_name}, not {name}"
            continue
        try:
            variant = Variant.parse(verdict.variant)
            offered.check_offered(project, variant)
        except KernelBuilderError as error:
            reasons[verdict.variant] = f"not built: {error}"
            continue
        if missing := obstacle(project, variant, fresh):
            reasons[verdict.variant] = f"not built: {missing.reason}"
        elif reason := _cross_compilation_difference(published / verdict.variant, variant):
            reasons[verdict.variant] = f"not built: {reason}"
    names = tuple(verdict.variant for verdict in verdicts if verdict.variant not in reasons)
    if names:
        # The comparison does not need the packages to load on this machine.
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


def _cross_compilation_difference(package: Path, variant: Variant) -> str | None:
    """Return why a rebuild here has other bytes: only one of the two builds is cross-compiled."""
    was_crossed = (PackageMetadata.read(package) or PackageMetadata()).is_cross_compiled
    if was_crossed == (variant.platform not in (None, this_platform())):
        return None
    if was_crossed:
        return f"it was cross-compiled, and this machine is {this_platform()}; verify it on another platform"
    return f"it was compiled on {variant.platform}; verify it on that platform"


def _toolchains_with_empty_cache(cache: Path, progress: Progress | None) -> Toolchains:
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
        described = json.loads((package / "metadata.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return {**described, "provenance": None} if isinstance(described, dict) else described
