"""Tells which edition of the format a parsed `build.toml` has.

Files before edition 5 have no `edition`. Edition 4 is read, as the public parser does: edition 5 is a superset of it.
Edition 3 and older are not; `kernel-builder update-build` rewrites them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError

EDITION = 5
NO_EDITION = "build.toml has no edition and is read as edition 4; `kernel-builder update-build DIR` rewrites it"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")

# Table -> keys that only editions before 4 have. `update-build` removes them or writes others in their place.
_OLD_KEYS: Mapping[str, tuple[str, ...]] = {
    "general": ("universal", "cuda-minver", "cuda-maxver"),
    "torch": ("universal", "name", "pyroot"),
    "kernel": ("language",),
}
# Table -> keys that edition 5 has added.
_NEW_KEYS: Mapping[str, tuple[str, ...]] = {
    "general": ("kernel-depends", "tpu"),
    "general.cuda": ("kernel-depends",),
    "general.neuron": ("kernel-depends",),
    "general.xpu": ("kernel-depends",),
}


def as_edition_5(document: Mapping[str, Any], place: TomlPlace) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a document as one of edition 5, and the warnings about its edition.

    The document is not validated further.

    Raises:
        ConfigError: If it has another edition than 4 and 5.
    """
    general = document.get("general")
    if not isinstance(general, dict) or general.get("edition") == EDITION:
        return document, ()
    at = replace(place, table="general", key="edition")
    licence, option = ("", "") if "license" in general else ("; it has no `license` either", " --license NAME")
    rewrites = f"`kernel-builder update-build DIR{option}` rewrites the file to edition 5"
    if "edition" in general:
        refuse_newer(general["edition"], at)
        if not _is_integer(general["edition"]):
            return document, ()
        raise ConfigError(
            f"this is edition {general['edition']}; expected edition 5{licence}", where=str(at), hint=rewrites
        )
    if old := tuple(_old_traits(document)):
        raise ConfigError(
            f"is missing, and {', '.join(old)} belongs to edition 3 or older; expected edition 5{licence}",
            where=str(at),
            hint=rewrites,
        )
    if new := tuple(_new_traits(document)):
        raise ConfigError(
            f"is missing, and {', '.join(new)} belongs to edition 5",
            where=str(at),
            hint="add `edition = 5` to [general], or run `kernel-builder update-build DIR`, which does",
        )
    return {**document, "general": {**general, "edition": EDITION}}, (NO_EDITION,)


def refuse_newer(edition: Any, place: TomlPlace) -> None:
    """Raise an error for an edition that this builder does not know.

    Raises:
        ConfigError: If it is an integer above 5. The reader of [general] reports other types.
    """
    if _is_integer(edition) and edition > EDITION:
        raise ConfigError(
            f"this is edition {edition}; expected edition 5",
            where=str(place),
            hint="this builder does not know that edition; update the builder, or write edition 5",
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (kind, name, table) of the tables whose keys differ between editions."""
    general = document.get("general")
    kernels = document.get("kernel")
    tables = [("general", "general", general), ("torch", "torch", document.get("torch"))]
    if isinstance(general, dict):
        tables += [(f"general.{name}",) * 2 + (general.get(name),) for name in ("cuda", "neuron", "xpu")]
    if isinstance(kernels, dict):
        tables += [("kernel", f"kernel.{name}", table) for name, table in kernels.items()]
    yield from ((kind, name, table) for kind, name, table in tables if isinstance(table, dict))


def _old_traits(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what tells that a document is older than edition 4, in the words of an error."""
    for kind, name, table in _tables(document):
        yield from (f"`[{name}] {key}`" for key in _OLD_KEYS.get(kind, ()) if key in table)
        if kind == "general":
            yield from (f"a [general] without `{key}`" for key in ("version", "backends") if key not in table)
        if kind == "kernel" and "backend" not in table and "language" not in table:
            yield f"a [{name}] without `backend`"
    if not any(name in document for name in FRAMEWORKS):
        yield f"a file without {', '.join(f'[{name}]' for name in FRAMEWORKS[:-1])} and [{FRAMEWORKS[-1]}]"


def _new_traits(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys and values of a document that edition 4 does not have."""
    for kind, name, table in _tables(document):
        yield from (f"`[{name}] {key}`" for key in _NEW_KEYS.get(kind, ()) if key in table)
        if kind == "torch" and isinstance(table.get("stable-abi"), dict):
            yield "`[torch] stable-abi` as a table"
