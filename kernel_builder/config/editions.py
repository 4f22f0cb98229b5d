"""Editions of `build.toml` before 6: `as_current` reads them, `converted` rewrites a file.

Files before edition 5 have no `edition`, and those before edition 4 may have no `version` and no table of a framework.
Edition 5 is a superset of edition 4. Editions 1 and 2 are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit import items

from kernel_builder import toml_file
from kernel_builder.config import known_backends
from kernel_builder.config.toml_schema import TomlPlace, nearest
from kernel_format.errors import ConfigError

EDITION = 6
NO_EDITION = "build.toml has no edition and is read as edition 3 or 4; `kernel-builder update-build DIR` converts it"
FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")
_UPDATE = f"convert the file to edition {EDITION}: `kernel-builder update-build DIR`"
# Stands in a file for a value that `converted` replaces as text.
_MARK = "kernel-builder update-build: "
_SINCE = f"edition {EDITION}, of the public builder's release 0.18"


def as_current(document: Mapping[str, Any], place: TomlPlace) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a document as one of the current edition, and the warnings about its edition.

    The document is not validated further.
    """
    general, kernels = document.get("general"), document.get("kernel", {})
    tables = (
        {name: table for name, table in kernels.items() if isinstance(table, dict)} if isinstance(kernels, dict) else {}
    )
    if not isinstance(general, dict):
        return document, ()
    if general.get("edition") == EDITION:
        for name in (name for name, table in tables.items() if "backend" in table):
            raise ConfigError(
                f"unknown key; edition {EDITION} uses `language` instead",
                where=str(TomlPlace(place.file, f"kernel.{name}", "backend")),
                hint=f'write language = "cpp-{tables[name]["backend"]}"',
            )
        return document, ()
    _refuse_unknown(general, TomlPlace(place.file, "general", "edition"))
    edition = general.get("edition", 3)
    if type(edition) is not int:
        return document, ()  # the reader of [general] reports it
    _refuse_newer(document, general, place.file)
    converted = {**document, "general": {**general, "edition": EDITION}}
    if edition < 4:
        converted["general"].setdefault("version", 1)
        if not any(name in document for name in FRAMEWORKS):
            converted["torch-noarch"] = {}
    if tables:
        renamed = {
            name: {
                "language": _language(table, TomlPlace(place.file, f"kernel.{name}")),
                **{key: value for key, value in table.items() if key != "backend"},
            }
            for name, table in tables.items()
        }
        converted["kernel"] = {**kernels, **renamed}
    return converted, () if "edition" in general else (NO_EDITION,)


def _refuse_unknown(general: Mapping[str, Any], place: TomlPlace) -> None:
    """Raise an error for an edition that is not read or converted."""
    edition = general.get("edition")
    if type(edition) is int and not 3 <= edition <= EDITION:
        raise ConfigError(
            f"this is edition {edition}; expected edition {EDITION}",
            where=str(place),
            hint=f"update the builder: the newest edition that it knows is {_SINCE}"
            if edition > EDITION
            else "convert the file with `kernel-builder update-build` of a release of the Hub's builder that reads "
            f"this edition, or write the keys of edition {EDITION}: docs/build-toml.md",
        )


def _refuse_newer(document: Mapping[str, Any], general: Mapping[str, Any], file: str) -> None:
    """Raise an error for values that older editions do not have."""
    if isinstance(general.get("upstream"), list):
        message = f"expected a string, got an array, which needs {_SINCE}"
        raise ConfigError(message, where=str(TomlPlace(file, "general", "upstream")), hint=_UPDATE)
    if isinstance(tvm_ffi := document.get("tvm-ffi"), dict) and "src" not in tvm_ffi:
        message = f"is missing; it is optional since {_SINCE}"
        raise ConfigError(message, where=str(TomlPlace(file, "tvm-ffi", "src")), hint=f"add it, or {_UPDATE}")


def _language(kernel: Mapping[str, Any], place: TomlPlace) -> str:
    """Return the `language` of a `[kernel.<name>]` table at `place`, by the `backend` that older editions have."""
    if "language" in kernel:
        raise ConfigError(f"unknown key, which needs {_SINCE}", where=str(place.at("language")), hint=_UPDATE)
    if "backend" not in kernel:
        raise ConfigError("is missing", where=str(place.at("backend")), hint='add it, for example backend = "cuda"')
    backend = kernel["backend"]
    if backend not in (names := known_backends.WITH_KERNELS):
        meant = nearest(str(backend), names)
        raise ConfigError(
            f"{backend!r} is not a backend with compiled kernels; expected one of {', '.join(f'`{n}`' for n in names)}",
            where=str(place.at("backend")),
            hint=f"did you mean `{meant}`?" if meant else "choose one from the list",
        )
    return f"cpp-{backend}"


def converted(text: str, path: Path, license: str | None = None) -> str:
    """Return the text of a `build.toml` in the current edition, with its comments and its order of keys.

    `license` is the SPDX name of the license of a file without one.
    """
    general = toml_file.parse(text, str(path)).get("general")
    if not isinstance(general, dict) or general.get("edition") == EDITION:
        return text
    _refuse_unknown(general, TomlPlace(str(path), "general", "edition"))
    if license is None and "license" not in general:
        raise ConfigError(
            "is missing, but the current edition needs it",
            where=str(TomlPlace(str(path), "general", "license")),
            hint=f"run `kernel-builder update-build {path.parent} --license NAME`, with the license's SPDX name",
        )
    try:
        document = tomlkit.parse(text.replace("\r\n", "\n"))
    except ValueError as error:  # Python's parser accepts more
        raise ConfigError(f"cannot be converted: {error}", where=str(path), hint="simplify this part") from error
    table: Any = document["general"]
    if isinstance(upstream := table.get("upstream"), str):
        table["upstream"] = [str(upstream)]
    if "edition" in table:
        table["edition"] = EDITION
    wanted = {"version": 1, "edition": EDITION, "license": license}
    added = {key: value for key, value in wanted.items() if value is not None and key not in table}
    plain = [key for key, value in table.items() if not isinstance(value, items.Table)]
    last = ""
    if plain and isinstance(table, items.Table):  # tomlkit would add keys after the comment of the next table
        last = tomlkit.item(table[plain[-1]]).as_string()
        table[plain[-1]] = _MARK
    else:
        table.update(added)
    kernels: Any = document.get("kernel")
    for name, kernel in kernels.items() if isinstance(kernels, Mapping) else ():
        if isinstance(kernel, dict) and (backend := kernel.get("backend")):
            language = _language({"backend": backend}, TomlPlace(str(path), f"kernel.{name}"))
            kernel["backend"] = tomlkit.value(backend.as_string().replace(backend, _MARK + language))
    if not any(name in document for name in FRAMEWORKS):
        document["torch-noarch"] = tomlkit.table()

    def line(match: re.Match[str]) -> str:
        lines = [f"\n{match[1]}{key} = {tomlkit.item(value).as_string()}" for key, value in added.items()]
        return f"{match[1]}{match[2]}{last}{match[3]}{''.join(lines)}"

    new = re.sub(rf"""backend(["']?\s*=\s*["']+){_MARK}""", r"language\1", document.as_string())
    new = re.sub(rf'^(.*\.|[ \t]*)(.*)"{_MARK}"(.*)$', line, new, flags=re.MULTILINE)
    return new.replace("\n", "\r\n") if "\r\n" in text else new
