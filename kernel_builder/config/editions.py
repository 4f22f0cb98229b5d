"""The edition of a parsed `build.toml`.

Files before edition 5 have no `edition`. Edition 4 is read, as by the public parser: edition 5 is a superset of it.
`conversion` converts edition 3. Editions 1 and 2 are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError

EDITION = 5
NO_EDITION = "build.toml has no edition and is read as edition 4; `kernel-builder update-build DIR` converts it"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")


def as_current(document: Mapping[str, Any], place: TomlPlace) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a document as one of the current edition, and the warnings about its edition.

    The document is not validated further.
    """
    general = document.get("general")
    if not isinstance(general, dict) or general.get("edition") == EDITION:
        return document, ()
    at = replace(place, table="general", key="edition")
    refuse_unknown(general, at)
    license, option = ("", "") if "license" in general else ("; `license` is missing too", " --license NAME")
    hint = f"`kernel-builder update-build DIR{option}` converts the file to edition {EDITION}"
    if "edition" in general:
        if not _is_integer(general["edition"]):
            return document, ()  # the reader of [general] reports it
        message = f"this is edition {general['edition']}; expected edition {EDITION}{license}"
        raise ConfigError(message, where=str(at), hint=hint)
    if "version" not in general or not any(name in document for name in FRAMEWORKS):
        missing = "`version`" if "version" not in general else f"[{'], ['.join(FRAMEWORKS)}]"
        message = f"is missing, and so is {missing}, as in edition 3; expected edition {EDITION}{license}"
        raise ConfigError(message, where=str(at), hint=hint)
    return {**document, "general": {**general, "edition": EDITION}}, (NO_EDITION,)


def refuse_unknown(general: Mapping[str, Any], place: TomlPlace) -> None:
    """Raise an error for an edition that is not read or converted."""
    edition = general.get("edition")
    if _is_integer(edition) and not 3 <= edition <= EDITION:
        raise ConfigError(
            f"this is edition {edition}; expected edition {EDITION}",
            where=str(place),
            hint="update the builder, which does not know that edition"
            if edition > EDITION
            else "convert the file with `kernel-builder update-build` of a release of the Hub's builder that reads "
            "this edition, or write the keys of edition 5: docs/build-toml.md",
        )


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
