"""Conversion of a `build.toml` to the current edition, with its comments and its order of keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.items

from kernel_builder import toml_file
from kernel_builder.config import editions
from kernel_builder.config.toml_schema import TomlPlace
from kernel_format.errors import ConfigError


def converted(text: str, path: Path, license: str | None = None) -> str:
    """Return the text of a `build.toml` in the current edition, with its comments and its order of keys.

    Args:
        license: The SPDX name of the license of a file without one.
    """
    where = TomlPlace(str(path))
    parsed = toml_file.parse(text, str(path))
    general = parsed.get("general")
    if not isinstance(general, dict) or general.get("edition") == editions.EDITION:
        return text
    editions.refuse_unknown(general, replace(where, table="general", key="edition"))
    if license is None and "license" not in general:
        raise ConfigError(
            "is missing, and the current edition needs it",
            where=str(replace(where, table="general", key="license")),
            hint=f"run `kernel-builder update-build {path.parent} --license NAME`, with the license's SPDX name",
        )
    try:
        document = tomlkit.parse(text.replace("\r\n", "\n"))
    except ValueError as error:  # Python's parser accepts more
        raise ConfigError(f"cannot be converted: {error}", where=str(path), hint="simplify this part") from error
    table = document["general"]
    assert isinstance(table, dict)
    for key, value in (("version", 1), ("edition", editions.EDITION), ("license", license)):
        if key == "edition" and key in table:
            table[key] = value
        elif value is not None and key not in table:
            _add(table, key, value)
    if isinstance(upstream := table.get("upstream"), str):
        table["upstream"] = [str(upstream)]
    _rename(document.body, (), TomlPlace(str(path)))
    if not any(name in document for name in editions.FRAMEWORKS):
        document["torch-noarch"] = tomlkit.table()
    new = document.as_string()
    return new.replace("\n", "\r\n") if "\r\n" in text else new


def _add(table: dict[str, Any], key: str, value: Any) -> None:
    """Add a key after the last value of a table; tomlkit adds it after the comment of the next table."""
    if not isinstance(table, tomlkit.items.Table):
        table[key] = value
        return
    body = table.value.body
    values = [number for number, (name, item) in enumerate(body) if name and not isinstance(item, tomlkit.items.Table)]
    item = tomlkit.item(value)
    item.trivia.trail = "\n"
    body.insert(values[-1] + 1, (tomlkit.key(key), item))


def _rename(body: list[Any], path: tuple[str, ...], place: TomlPlace) -> None:
    """Write `language` in place of the `backend` of each kernel, in whatever form the table is written."""
    for number, (key, item) in enumerate(body):
        inner = (*path, key.key) if key else path
        if inner[:1] == ("kernel",) and inner[2:] == ("backend",):
            language = editions.language({"backend": item.unwrap()}, replace(place, table=".".join(path)))
            new = tomlkit.value(item.as_string().replace(item.unwrap(), language))
            new.trivia.__dict__.update(vars(item.trivia))
            written = key.as_string().replace("backend", "language")
            body[number] = (tomlkit.items.SingleKey("language", key.t, key.sep, written), new)
        elif key and isinstance(item, (tomlkit.items.Table, tomlkit.items.InlineTable)):
            _rename(item.value.body, inner, place)
