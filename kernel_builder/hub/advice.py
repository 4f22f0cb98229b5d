"""Whether a published kernel loads in this environment, and if not, the smallest changes that make it load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kernel_builder.hub import fit
from kernel_builder.hub.partial_download import download
from kernel_builder.hub.remote_repository import RemoteRepository, refuse_redirect
from kernel_builder.hub.verification import newest_commit
from kernel_format.errors import VariantError
from kernel_format.files import temporary_directory
from kernel_format.metadata import PackageMetadata
from kernel_format.variant import Variant, parse

_METADATA = re.compile(r"build/([^/]+)/metadata\.json")
_ELSEWHERE = "a machine with"


@dataclass(frozen=True)
class Option:
    """Changes of this environment or of the call, and the variant that the client then loads."""

    changes: tuple[str, ...]
    variant: str


@dataclass(frozen=True)
class Advice:
    """Whether `get_kernel` finds a variant.

    Attributes:
        environment: This environment, in one line.
        loads: The variant that the client loads; None if there is none.
        options: The changes that make the kernel load, fewest first; empty if it loads.
        conflict: The releases of the client that the installed transformers accepts, if it does not accept this one.
    """

    name: str
    environment: str
    loads: str | None
    options: tuple[Option, ...]
    conflict: str | None


def advise(name: str, *, endpoint: str | None = None, token: str | None = None) -> Advice:
    """Return whether a kernel loads in this environment, by the metadata on its Hub.

    Args:
        name: `ORG/NAME` for the newest version, or `ORG/NAME@REVISION`.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
        token: The token. None: `$HF_TOKEN`, or else the token of `hf auth login`.

    Raises:
        HubError: If there is no such kernel, or the Hub cannot be reached.
    """
    repo_id, _, revision = name.partition("@")
    repository = RemoteRepository(repo_id, endpoint=endpoint, token=token)
    commit = newest_commit(repository, revision or None)
    environment = fit.this_environment()
    here = dict(_variants(repository, commit))
    chosen = fit.choose(here, environment)
    if chosen is not None and not fit.changes(chosen, here[chosen], environment):
        return Advice(name, environment.text, chosen.name, (), environment.client_conflict)
    found: dict[tuple[str, ...], Variant] = {}
    for branch, head in [("", commit), *repository.branches().items()]:
        if branch and (head == commit or not re.fullmatch(r"v\d+", branch)):
            continue
        call = (f"get_kernel({repo_id!r}, version={branch[1:]})",) if branch else ()
        for variant, about in _variants(repository, head) if branch else here.items():
            changes = (*call, *fit.changes(variant, about, environment))
            if not any(change.startswith(_ELSEWHERE) for change in changes):
                found[changes] = min(found.get(changes, variant), variant, key=fit.preference)
    ordered = sorted(found.items(), key=lambda item: (len(item[0]), fit.preference(item[1])))
    fewest = [Option(changes, variant.name) for changes, variant in ordered if len(changes) == len(ordered[0][0])]
    return Advice(name, environment.text, None, tuple(fewest), environment.client_conflict)


def _variants(repository: RemoteRepository, commit: str) -> Iterator[tuple[Variant, PackageMetadata]]:
    """Yield the variants of a revision with their metadata; empty metadata for a package without any."""
    files = repository.files(commit)
    refuse_redirect(repository, commit, files)
    names = {path.split("/")[1] for path in files if path.startswith("build/") and path.count("/") > 1}
    with temporary_directory() as directory:
        about = {path: file for path, file in files.items() if _METADATA.fullmatch(path)}
        download(repository, commit, about, directory)
        for name in sorted(names):
            with suppress(VariantError):
                yield parse(name), PackageMetadata.read(directory / "build" / name) or PackageMetadata()
