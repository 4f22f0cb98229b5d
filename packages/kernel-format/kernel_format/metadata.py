"""`metadata.json`, the description that every package carries.

`kernels_data.Metadata` reads valid files only, does not write, and has no provenance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "metadata.json"
TEXT_BYTES = 1 << 20  # of it, as of other texts of a package that every client parses
# The key of `provenance` with the compiler of another platform that made the binary.
CROSS_COMPILER = "cross-compiler"
# The key of `provenance` that lists the capabilities that a build was limited to.
CAPABILITIES_LIMITED = "capabilities-limited"
# The key of `provenance` with the digests of the sources; see `steps.recorded_sources`.
SOURCES = "sources"
# The key of `provenance` with the repository and the variant that the package was built for: a signature covers them.
PLACE = "built-for"
# The key of `provenance` with the status of a back end without tests on hardware.
STATUS = "status"

_ORIGIN = {"version": re.compile(r"[\w.+!-]{1,80}"), "commit": re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")}


@dataclass(frozen=True)
class PackageMetadata:
    """The content of `metadata.json`.

    Packages of other tools are read as far as possible: missing keys and those of another type are None or empty,
    except `kernel-depends`, since the client runs the code of those kernels.

    Attributes:
        id: The module name and op namespace, unique by content.
        backend: The backend's name, for example `cuda`.
        archs: The capabilities that the binary has code for.
        kernel_depends: Other kernels of the Hub, each with `repo-id` and `version` or `revision`.
        kernels_minver: The first release of the client that loads the package. Clients from 0.16 on check it.
        provenance: The origin of the builder (`kernel-builder`) and of the sources (`kernel`); see `origin`.
        digest: The algorithm, and the digest of every file.
    """

    id: str | None = None
    name: str | None = None
    version: int | None = None
    license: str | None = None
    python_depends: tuple[str, ...] = ()
    kernel_depends: tuple[Mapping[str, Any], ...] = ()
    kernels_minver: str | None = None
    backend: str | None = None
    archs: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    upstream: tuple[str, ...] = ()
    source: str | None = None
    digest: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, data: bytes | str) -> PackageMetadata:
        """Read a `metadata.json` of any tool.

        Raises:
            ValueError: If it is not a JSON object, or has an unknown form of `kernel-depends`.
        """
        try:
            raw = json.loads(data)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        if not isinstance(raw, dict):
            raise ValueError("is not a JSON object")  # noqa: TRY004  # of the content, not of an argument
        backend, upstream = _object(raw.get("backend")), raw.get("upstream")
        return cls(
            id=_text(raw.get("id")),
            name=_text(raw.get("name")),
            version=version if type(version := raw.get("version")) is int else None,
            license=_text(raw.get("license")),
            python_depends=_texts(raw.get("python-depends")),
            kernel_depends=_dependencies(raw.get("kernel-depends")),
            kernels_minver=_text(raw.get("kernels-minver")),
            backend=_text(backend.get("type")),
            archs=_texts(backend.get("archs")),
            provenance=_object(raw.get("provenance")),
            upstream=_texts(upstream if isinstance(upstream, list) else [upstream]),
            source=_text(raw.get("source")),
            digest=digest if isinstance(digest := raw.get("digest"), dict) else None,
        )

    @classmethod
    def read(cls, package: Path) -> PackageMetadata | None:
        """Read the metadata of the package in a directory; None if it has none that `from_json` reads."""
        path = package / NAME
        if not path.is_file() or path.stat().st_size > TEXT_BYTES:  # reading a pipe may never end
            return None
        try:
            return cls.from_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, without keys that have no value."""
        content: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "version": self.version,
            "license": self.license,
            "python-depends": list(self.python_depends),
            "backend": {"type": self.backend, **({"archs": list(self.archs)} if self.archs else {})},
            "provenance": dict(self.provenance),
        }
        optional = {
            "kernel-depends": [dict(depend) for depend in self.kernel_depends],
            "kernels-minver": self.kernels_minver,
            "upstream": list(self.upstream) if len(self.upstream) > 1 else "".join(self.upstream),
            "source": self.source,
            "digest": self.digest,
        }
        return {**content, **{key: value for key, value in optional.items() if value}}

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @property
    def python_name(self) -> str | None:
        """The name of the Python module, which is the kernel's with underscores."""
        return self.name.replace("-", "_") if self.name else None

    def origin(self, part: str) -> Mapping[str, Any]:
        """Return the origin of the `kernel` or the `kernel-builder`: `version`, `commit`, and whether `dirty`.

        Values that cannot be a version or a commit are left out: they are printed on terminals and given to git.
        """
        recorded = _object(self.provenance.get(part))
        if not recorded:
            return {}
        valid = {
            key: value
            for key, form in _ORIGIN.items()
            if isinstance(value := recorded.get(key), str) and form.fullmatch(value)
        }
        return {**valid, "dirty": bool(recorded.get("dirty"))}

    @property
    def has_commit(self) -> bool:
        """Whether a commit of the sources is recorded, so that anyone can build the package again."""
        return "commit" in self.origin("kernel")

    @property
    def allowed_checks(self) -> tuple[str, ...]:
        """The checks whose errors the publisher allowed, by name."""
        names = _texts(self.provenance.get("allowed-checks"))
        return tuple(name for name in names if re.fullmatch(r"[a-z-]{1,40}", name))

    @property
    def recorded_sources(self) -> Mapping[str, Any]:
        """The recorded digests of the sources; empty for packages of older builders and of other tools."""
        return _object(self.provenance.get(SOURCES))

    @property
    def place(self) -> Mapping[str, Any]:
        """The repository (`repo-id`) and the variant that it was built for; empty if they are not recorded."""
        return _object(self.provenance.get(PLACE))

    @property
    def only_capabilities(self) -> tuple[str, ...]:
        """The capabilities that the build was limited to; empty if it was not."""
        return _texts(self.provenance.get(CAPABILITIES_LIMITED))

    @property
    def is_cross_compiled(self) -> bool:
        """Whether a machine of another platform compiled the binary."""
        return bool(_object(self.provenance.get(CROSS_COMPILER)))

    @property
    def status(self) -> str | None:
        """The builder's status of packages that have not run on their hardware; None without a status."""
        stated = _text(self.provenance.get(STATUS))
        return stated if stated and re.fullmatch(r"[\w ,;.()-]{1,200}", stated) else None

    @property
    def is_dirty(self) -> bool:
        """Whether the sources or the builder had uncommitted changes."""
        return any(self.origin(part).get("dirty") for part in ("kernel", "kernel-builder"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _dependencies(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of `kernel-depends`. The client reads arrays as well: no entry may be left out."""
    entries = [] if value is None else value
    if not isinstance(entries, list):
        raise ValueError("has a `kernel-depends` that is not a list")  # noqa: TRY004  # of the content
    for entry in entries:
        known = entry.items() if isinstance(entry, dict) else ()
        types = {key: type(item) for key, item in known if item not in (None, "")}
        if types not in ({"repo-id": str, "version": int}, {"repo-id": str, "revision": str}):
            raise ValueError("has an entry of `kernel-depends` without a `repo-id` and one of `version` and `revision`")
    return tuple(entries)


def _texts(value: object) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else ()
    return tuple(entry for entry in entries if isinstance(entry, str))
