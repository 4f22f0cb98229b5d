"""Is a published kernel what it says it is? Its digests, its signature, its provenance, and its bytes built again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder import checks, pipeline
from kernel_builder.build.buildable import obstacle
from kernel_builder.config import offered
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.errors import HubError, KernelBuilderError, VerificationError
from kernel_builder.hub.packages import origin, table
from kernel_builder.hub.remote_repository import Repository
from kernel_builder.package.tree_digest import SIGNATURE, hash_tree

if TYPE_CHECKING:
    from kernel_builder.progress import Progress
    from kernel_builder.toolchain import Toolchains


@dataclass(frozen=True)
class Verdict:
    """What was found of one variant.

    Attributes:
        digest: What is wrong with its files; empty if they are those that its metadata lists.
        signature: `valid`, `none`, or what is wrong with it.
        provenance: Of which commit (`kernel`) and by which builder (`kernel-builder`) it was made, as it says itself.
        rebuilt: `equal`, or why it was not built again. None if that was not asked for.
        differing: The files whose bytes differ from those built again.
    """

    variant: str
    digest: tuple[str, ...]
    signature: str
    provenance: Mapping[str, Mapping[str, Any]]
    rebuilt: str | None = None
    differing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked is wrong. A package without a signature is not wrong."""
        return not self.digest and not self.differing and self.signature in ("valid", "none")


@dataclass(frozen=True)
class Verification:
    """The verdicts on a revision of a repository."""

    repo_id: str
    revision: str
    variants: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked is wrong with any variant."""
        return all(verdict.ok for verdict in self.variants)

    def as_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
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
        name: `ORG/NAME`, of the newest version, or `ORG/NAME@REVISION`.
        source: A directory of the kernel's project. It is built again, at the commit that each package names where the
            directory is in a git repository, and otherwise as it is.
        signers: Workflows whose signatures count, as `https://github.com/ORG/REPO/.github/workflows/FILE@REF`. Empty:
            those that the public client trusts.
        require_signature: A package without a signature is wrong, too.
        progress: Told of the downloads of toolchains, if any are missing.
        endpoint: Address of the Hub. None: where the Hub's own tools find it.
        token: None: where they find it.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
        VerificationError: If there is nothing to check, or a signer is not one.
        KernelBuilderError: If `source` cannot be built.
    """
    repo_id, _, revision = name.partition("@")
    repository = Repository(repo_id, endpoint=endpoint, token=token)
    revision = _commit(repository, revision or None)
    with tempfile.TemporaryDirectory(prefix="kernel-builder-verify-") as temporary:
        root = repository.download(revision, ["build/*"], Path(temporary, "published"))
        packages = sorted(path for path in (root / "build").glob("[!.]*") if path.is_dir())
        if not packages:
            raise VerificationError(
                "has no packages",
                where=f"{repo_id}@{revision}",
                hint="builds are on the branch of their version: ORG/NAME@v1",
            )
        verdicts = [_verdict(package, signers, require_signature) for package in packages]
        if source is not None:
            verdicts = _rebuild(verdicts, root / "build", source, Path(temporary), progress)
    return Verification(repo_id, revision, tuple(verdicts))


def _commit(repository: Repository, revision: str | None) -> str:
    """The commit of a revision, or of the newest version."""
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


def _verdict(package: Path, signers: Sequence[str], require_signature: bool) -> Verdict:
    report = checks.run(package, only=("digest",))
    wrong = tuple(f"{f.path} {f.message}" for f in report.findings) or tuple(report.skipped.values())
    metadata = _metadata(package)
    recorded = {part: origin(metadata, part) for part in ("kernel", "kernel-builder")}
    signature = _signature(package, signers)
    if signature == "none" and require_signature:
        signature = "there is none, and one is required"
    return Verdict(package.name, wrong, signature, recorded)


def _metadata(package: Path) -> Mapping[str, Any]:
    try:
        return table(json.loads((package / "metadata.json").read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


_SIGNER = re.compile(r"https://github\.com/(?P<repository>[^/]+/[^/]+)/\.github/workflows/[^@]+@.+")


def _signature(package: Path, signers: Sequence[str]) -> str:
    """What the public client says of a package's signature."""
    if not (package / SIGNATURE).is_file():
        return "none"
    from kernels.verify import DEFAULT_POLICIES, GitHubWorkflowPolicy, VerificationResult, verify_variant

    policies = []
    for signer in signers:
        match = _SIGNER.fullmatch(signer)
        if not match:
            raise VerificationError(
                "is not a workflow; expected https://github.com/ORG/REPO/.github/workflows/FILE@REF",
                where=f"--signer {signer}",
            )
        policies.append(GitHubWorkflowPolicy(repo_id=match["repository"], signer_uris=[signer]))
    try:
        result = verify_variant(package, policies or DEFAULT_POLICIES)
    except Exception as error:  # whatever the libraries below raise where Sigstore cannot be reached
        return f"there is one, and it cannot be checked: {str(error) or type(error).__name__}"
    if isinstance(result, (VerificationResult.Success, VerificationResult.DigestVerificationFailure)):
        return "valid"  # of the metadata; the digest is a question of its own
    return str(getattr(result, "reason", type(result).__name__))


def _rebuild(
    verdicts: Sequence[Verdict],
    published: Path,
    source: Path,
    temporary: Path,
    progress: Progress | None,
) -> list[Verdict]:
    """Build what this machine can of the packages again, from nothing, and compare."""
    groups: dict[str | None, list[Verdict]] = {}
    repository = _git_repository(source)
    for verdict in verdicts:
        commit = verdict.provenance["kernel"].get("commit")
        groups.setdefault(commit if repository else None, []).append(verdict)
    done = {}
    for number, (commit, group) in enumerate(groups.items()):
        directory = source
        if repository and commit:
            try:
                directory = _checkout(repository, commit, temporary / f"source-{number}")
            except VerificationError as error:
                done.update({v.variant: replace(v, rebuilt=f"not built: {error}") for v in group})
                continue
        compared = _build_and_compare(group, published, directory, temporary / f"built-{number}", progress)
        done.update({verdict.variant: verdict for verdict in compared})
    return [done[verdict.variant] for verdict in verdicts]


def _git_repository(source: Path) -> tuple[Path, str] | None:
    """The top of the git repository that a directory is in, and where in it; None if it is in none."""
    command = ["git", "-C", str(source), "rev-parse", "--show-toplevel", "--show-prefix"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    top, prefix = os.fsdecode(done.stdout).split("\n")[:2]
    return Path(top), prefix


def _checkout(repository: tuple[Path, str], commit: str, target: Path) -> Path:
    """The project at a commit, in a clone of its own: the user's files stay as they are."""
    top, prefix = repository
    for command in (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", str(top), str(target)],
        ["git", "-C", str(target), "checkout", "--quiet", "--detach", commit],
    ):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise VerificationError(
                f"the commit {commit[:12]} cannot be checked out: {(done.stderr.strip() or '?').splitlines()[-1]}",
                where=str(top),
                hint="fetch the commit that the package names",
            )
    return target / prefix


def _build_and_compare(
    verdicts: Sequence[Verdict], published: Path, source: Path, target: Path, progress: Progress | None
) -> list[Verdict]:
    fresh = _fresh(target / "cache", progress)
    reasons: dict[str, str] = {}
    project = read_project(source)
    for verdict in verdicts:
        try:
            variant = Variant.parse(verdict.variant)
            offered.check_offered(project, variant)
        except KernelBuilderError as error:
            reasons[verdict.variant] = f"not built: {error}"
            continue
        if missing := obstacle(variant, fresh):
            reasons[verdict.variant] = f"not built: {missing.reason}"
    names = tuple(verdict.variant for verdict in verdicts if verdict.variant not in reasons)
    if names:
        # Without the load: the published bytes are not judged by whether this machine can run them.
        pipeline.build(
            pipeline.BuildRequest(directories=(source,), variants=names, out=target / "build", load=False), fresh
        )
    return [
        replace(verdict, rebuilt=reasons[verdict.variant])
        if verdict.variant in reasons
        else _compared(verdict, published / verdict.variant, target / "build" / verdict.variant)
        for verdict in verdicts
    ]


def _fresh(cache: Path, progress: Progress | None) -> Toolchains:
    """The toolchains that the user has, and nothing built with them."""
    from kernel_builder.toolchain import Toolchains

    store = Toolchains().store.root
    store.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True)
    (cache / "toolchains").symlink_to(store, target_is_directory=True)
    return Toolchains(cache=cache, progress=progress)


def _compared(verdict: Verdict, published: Path, built: Path) -> Verdict:
    """What differs. The provenance within the metadata says who built it, and may differ."""
    first, second = hash_tree(published).files, hash_tree(built).files
    differing = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    if "metadata.json" in differing:
        one, other = ({**_metadata(path), "provenance": None} for path in (published, built))
        if one == other:
            differing.remove("metadata.json")
    return replace(verdict, rebuilt="differs" if differing else "equal", differing=tuple(differing))
