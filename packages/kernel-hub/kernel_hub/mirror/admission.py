"""Which packages of another Hub are served: those whose signature and digest are right.

Every commit is checked when a file of a package in it is first asked for, also an old one that a lock file names. The
digests of large files are in the commit, so nothing has to be downloaded for it.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from threading import Lock

from kernels_data import Metadata

from kernel_format.signatures import read_signers, signature_verdict
from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import busy, not_admitted
from kernel_hub.settings import MirrorSettings

_METADATA = "metadata.json"
_SIGNATURE = "metadata.json.sigstore"
_LARGEST = 1 << 20
_REMEMBERED = 1000


class Admission:
    """Decides which packages are served. What was admitted once stays so, also while Sigstore cannot be reached."""

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._signers = read_signers(settings.signers)
        policy = repr((self._signers.names, settings.require_signatures))
        self._policy = hashlib.sha256(policy.encode()).hexdigest()[:8]
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()  # clients ask for many files of a package at once

    def check(self, repository: GitRepository, commit: str, path: str) -> None:
        """Check the package that a file belongs to, if it belongs to one.

        Raises:
            Refusal: If the signature or the digest of the package is wrong, or cannot be checked now.
        """
        parts = PurePosixPath(path).parts
        if len(parts) < 3 or parts[0] != "build":
            return
        folder = f"build/{parts[1]}"
        package = repository.trees.find(commit, folder)
        if package is None:
            return
        key = f"{package.oid}-{self._policy}"
        marker = repository.path / "admitted" / key
        if marker.exists():
            return
        with self._lock:
            if marker.exists():
                return
            reason = self._refused.get(key) or self._reason(repository, commit, folder)
            if reason is None:
                marker.parent.mkdir(exist_ok=True)
                marker.touch()
                return
            self._refused[key] = reason
            if len(self._refused) > _REMEMBERED:
                self._refused.popitem(last=False)
        raise not_admitted(
            f"{folder} of {repository.repo_id} at {commit[:12]} is not served: {reason}. Tell its publisher, or "
            f"compare with {repository.mirror_of}"
        )

    def _reason(self, repository: GitRepository, commit: str, folder: str) -> str | None:
        """Return why a package is not served, or None if it is."""
        listed = repository.trees.entries(commit, folder, recursive=True)
        files = {entry.path.removeprefix(f"{folder}/"): entry for entry in listed if not entry.is_folder}
        described, signature = files.get(_METADATA), files.get(_SIGNATURE)
        if described is None:
            return "it has a signature, but no metadata.json" if signature else self._unsigned()
        if any(entry.large or entry.size > _LARGEST for entry in (described, signature) if entry is not None):
            return "its metadata or its signature is too large"
        metadata = repository.trees.read(described)
        if signature is not None:
            with tempfile.TemporaryDirectory(prefix="kernel-builder-") as temporary:
                (Path(temporary) / _METADATA).write_bytes(metadata)
                (Path(temporary) / _SIGNATURE).write_bytes(repository.trees.read(signature))
                verdict = signature_verdict(Path(temporary), self._signers)
            if verdict.startswith("cannot be checked"):
                raise busy(f"the signature of {folder} of {repository.repo_id} {verdict}; try again")
            if verdict != "valid":
                return f"its signature is wrong: {verdict}"
        elif (reason := self._unsigned()) is not None:
            return reason
        try:
            digest = Metadata.from_bytes(metadata).digest
        except ValueError as error:
            return f"its metadata.json cannot be read: {error}" if signature else None  # of an early builder
        if digest is None:
            return "its signed metadata.json has no digest of the other files" if signature else None
        actual = {path: _digest(repository, entry) for path, entry in files.items() if _counts(path)}
        expected = digest.files
        if wrong := sorted(path for path in {*actual, *expected} if actual.get(path) != expected.get(path)):
            return f"{wrong[0]} is not the file that the digest in its metadata.json describes"
        return None

    def _unsigned(self) -> str | None:
        return "it has no signature" if self._settings.require_signatures else None


def _counts(path: str) -> bool:
    """Return whether the digest of a package has this file."""
    inside = PurePosixPath(path)
    return path not in {_METADATA, _SIGNATURE} and inside.suffix != ".pyc" and "__pycache__" not in inside.parts


def _digest(repository: GitRepository, entry: TreeEntry) -> str:
    if entry.large is not None:
        return base64.b64encode(bytes.fromhex(entry.large.sha256)).decode()
    return base64.b64encode(hashlib.sha256(repository.trees.read(entry)).digest()).decode()
