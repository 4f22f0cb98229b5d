"""The edition of a parsed `build.toml`.

Files before edition 5 have no `edition`. Edition 4 is read, as by the public parser: edition 5 is a superset of it.
`conversion` converts edition 3. Editions 1 and 2 are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from kernel_builder.config import known_backends, toml_schema
from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError

EDITION = 6
NO_EDITION = "build.toml has no edition and is read as edition 4; `kernel-builder update-build DIR` converts it"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")
_UPDATE = f"convert the file to edition {EDITION}: `kernel-builder update-build DIR`"
_SINCE = f"edition {EDITION}, of the public builder's release 0.18"


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
    warnings: tuple[str, ...] = ()
    if "edition" in general:
        if not _is_integer(general["edition"]):
            return document, ()  # the reader of [general] reports it
        if general["edition"] < 5:
            message = f"this is edition {general['edition']}; expected edition {EDITION}{license}"
            raise ConfigError(message, where=str(at), hint=hint)
    elif "version" not in general or not any(name in document for name in FRAMEWORKS):
        missing = "`version`" if "version" not in general else f"[{'], ['.join(FRAMEWORKS)}]"
        message = f"is missing, and so is {missing}, as in edition 3; expected edition {EDITION}{license}"
        raise ConfigError(message, where=str(at), hint=hint)
    else:
        warnings = (NO_EDITION,)
    _refuse_newer(document, general, place)
    converted = {**document, "general": {**general, "edition": EDITION}}
    if isinstance(kernels := document.get("kernel"), dict):
        converted["kernel"] = dict(kernels)
        for name, table in kernels.items():
            if isinstance(table, dict):  # else the reader of [kernel] reports it
                others = {key: value for key, value in table.items() if key != "backend"}
                named = language(table, TomlPlace(place.file, f"kernel.{name}"))
                converted["kernel"][name] = {"language": named, **others}
    return converted, warnings


def refuse_unknown(general: Mapping[str, Any], place: TomlPlace) -> None:
    """Raise an error for an edition that is not read or converted."""
    edition = general.get("edition")
    if _is_integer(edition) and not 3 <= edition <= EDITION:
        raise ConfigError(
            f"this is edition {edition}; expected edition {EDITION}",
            where=str(place),
            hint=f"update the builder: the newest edition that it knows is {_SINCE}"
            if edition > EDITION
            else "convert the file with `kernel-builder update-build` of a release of the Hub's builder that reads "
            f"this edition, or write the keys of edition {EDITION}: docs/build-toml.md",
        )


def language(kernel: Mapping[str, Any], place: TomlPlace) -> str:
    """Return the `language` of a `[kernel.<name>]` table at `place`, by the `backend` that older editions have."""
    if "language" in kernel:
        raise ConfigError(f"unknown key, which is of {_SINCE}", where=str(place.at("language")), hint=_UPDATE)
    if "backend" not in kernel:
        raise ConfigError("is missing", where=str(place.at("backend")), hint='add it, for example backend = "cuda"')
    names = [backend.name for backend in known_backends.known() if backend.kernel_keys is not None]
    one_of = toml_schema.one_of(names, "a backend with compiled kernels")
    return f"cpp-{one_of(kernel['backend'], place.at('backend'))}"


def _refuse_newer(document: Mapping[str, Any], general: Mapping[str, Any], place: TomlPlace) -> None:
    """Raise an error for values that older editions do not have."""
    if isinstance(general.get("upstream"), list):
        message = f"expected a string, got an array, which is of {_SINCE}"
        raise ConfigError(message, where=str(replace(place, table="general", key="upstream")), hint=_UPDATE)
    if isinstance(tvm_ffi := document.get("tvm-ffi"), dict) and "src" not in tvm_ffi:
        message = f"is missing; it is optional since {_SINCE}"
        raise ConfigError(message, where=str(replace(place, table="tvm-ffi", key="src")), hint=f"add it, or {_UPDATE}")


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
