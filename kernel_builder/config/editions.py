"""The edition of a parsed `build.toml`.

Files before edition 5 have no `edition`. Edition 4 is read, as by the public parser: edition 5 is a superset of it.
`conversion` converts edition 3. Editions 1 and 2 are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError

EDITION = 5
NO_EDITION = "build.toml has no edition and is read as edition 4; `kernel-builder update-build DIR` converts it"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")

# Table -> keys that only editions 1 and 2 have.
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
_HINT_OLD = (
    "convert the file with `kernel-builder update-build` of a release of the Hub's builder that reads this edition, or "
    "write the keys of edition 5: docs/build-toml.md"
)


def as_current(document: Mapping[str, Any], place: TomlPlace) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a document as one of the current edition, and the warnings about its edition.

    The document is not validated further.
    """
    general = document.get("general")
    if not isinstance(general, dict) or general.get("edition") == EDITION:
        return document, ()
    at = replace(place, table="general", key="edition")
    refuse_unknown(document, at)
    license, option = ("", "") if "license" in general else ("; `license` is missing too", " --license NAME")
    converts = f"`kernel-builder update-build DIR{option}` converts the file to edition {EDITION}"
    if "edition" in general:
        if not _is_integer(general["edition"]):
            return document, ()
        raise ConfigError(
            f"this is edition {general['edition']}; expected edition {EDITION}{license}", where=str(at), hint=converts
        )
    if old := tuple(_traits_of_edition_3(document)):
        raise ConfigError(
            f"is missing, and {', '.join(old)} belongs to edition 3; expected edition {EDITION}{license}",
            where=str(at),
            hint=converts,
        )
    if new := tuple(_traits_of_edition_5(document)):
        raise ConfigError(
            f"is missing, and {', '.join(new)} belongs to edition 5",
            where=str(at),
            hint="add `edition = 5` to [general], or run `kernel-builder update-build DIR`, which adds it",
        )
    return {**document, "general": {**general, "edition": EDITION}}, (NO_EDITION,)


def refuse_unknown(document: Mapping[str, Any], place: TomlPlace) -> None:
    """Raise an error for an edition that is not read or converted."""
    edition = document["general"].get("edition")
    if _is_integer(edition) and edition > EDITION:
        raise ConfigError(
            f"this is edition {edition}; expected edition {EDITION}",
            where=str(place),
            hint=f"this builder does not know that edition; update the builder, or write edition {EDITION}",
        )
    if old := tuple(_traits_of_edition_2(document)):
        raise ConfigError(
            f"{', '.join(old)} belongs to edition 1 or 2; expected edition {EDITION}", where=str(place), hint=_HINT_OLD
        )
    if _is_integer(edition) and edition < 3:
        raise ConfigError(f"this is edition {edition}; expected edition {EDITION}", where=str(place), hint=_HINT_OLD)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (kind, name, table) of the tables whose keys differ between editions."""
    general = document["general"]
    kernels = document.get("kernel")
    tables = [("general", "general", general), ("torch", "torch", document.get("torch"))]
    tables += [(f"general.{name}",) * 2 + (general.get(name),) for name in ("cuda", "neuron", "xpu")]
    if isinstance(kernels, dict):
        tables += [("kernel", f"kernel.{name}", table) for name, table in kernels.items()]
    yield from ((kind, name, table) for kind, name, table in tables if isinstance(table, dict))


def _traits_of_edition_2(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a document without `edition` that only editions 1 and 2 have."""
    if "edition" in document["general"]:
        return
    for kind, name, table in _tables(document):
        yield from (f"`[{name}] {key}`" for key in _OLD_KEYS.get(kind, ()) if key in table)
    if "backends" not in document["general"]:
        yield "a [general] without `backends`"


def _traits_of_edition_3(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of a document from edition 4 that edition 3 permits."""
    if "version" not in document["general"]:
        yield "a [general] without `version`"
    if not any(name in document for name in FRAMEWORKS):
        yield f"a file without {', '.join(f'[{name}]' for name in FRAMEWORKS[:-1])} and [{FRAMEWORKS[-1]}]"


def _traits_of_edition_5(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys and values of a document that edition 4 does not have."""
    for kind, name, table in _tables(document):
        yield from (f"`[{name}] {key}`" for key in _NEW_KEYS.get(kind, ()) if key in table)
        if kind == "torch" and isinstance(table.get("stable-abi"), dict):
            yield "`[torch] stable-abi` as a table"
