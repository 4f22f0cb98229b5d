"""Reads a TOML document by its JSON schema: checks each value, and returns it as the program uses it.

The reader knows the keywords that `build.schema.json` has. `title`, `description` and `examples` are parts of its error
messages, and `format` names the conversion of a string. Arrays become tuples.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_builder import toml_file
from kernel_format.errors import ConfigError
from kernel_format.release import Release, Version

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ARTICLES = {"array": "an array", "integer": "an integer", "object": "a table", "date": "a date or time"}
_FORMATS: Mapping[str, Callable[[str], Any]] = {
    "path": lambda text: PurePosixPath(text).as_posix(),
    "release": lambda text: Release(*Version.parse(text)),
    "version": Version.parse,
}


@dataclass(frozen=True)
class TomlPlace:
    """The place of a value in a file, shown as `build.toml: [kernel.relu] src`."""

    file: str
    table: str = ""
    key: str = ""

    def __str__(self) -> str:
        if not self.table:  # the keys of the document itself are tables
            return f"{self.file}: [{self.key}]" if self.key else self.file
        return f"{self.file}: [{self.table}] {self.key}".rstrip()

    def at(self, key: str) -> TomlPlace:
        """Return the place of another key in the same table."""
        return replace(self, key=key)

    def as_table(self) -> TomlPlace:
        """Return the place of the table that is the value of this key."""
        return TomlPlace(self.file, f"{self.table}.{self.key}" if self.table else self.key)


_SYNONYMS: Mapping[str, str] = toml_file.read(Path(__file__).with_name("synonyms.toml"))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that `name` probably misspells, or is another name for."""
    if _SYNONYMS.get(name.lower()) in (known := list(known)):
        return _SYNONYMS[name.lower()]
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


@dataclass(frozen=True)
class SchemaReader:
    """Reads values by schemas that may refer to `definitions`; `docs` is the page that describes the keys."""

    definitions: Mapping[str, Any]
    docs: str

    def read(self, value: Any, schema: Any, place: TomlPlace) -> Any:
        """Return a value that a schema describes.

        Raises:
            ConfigError: If the schema does not allow the value.
        """
        if schema is True:
            return value
        if "$ref" in schema:
            return self.read(value, self.definitions[schema["$ref"].rpartition("/")[2]], place)
        _check_type(value, [schema["type"]] if isinstance(schema["type"], str) else schema["type"], place)
        if isinstance(value, dict):
            return self._table(value, schema, place.as_table())
        if isinstance(value, list):
            if len(value) < schema.get("minItems", 0):
                example = str(schema["examples"][0]).replace("'", '"')
                raise ConfigError(
                    "is an empty array", where=str(place), hint=f"write for example {place.key} = {example}"
                )
            return tuple(self.read(item, schema["items"], place) for item in value)
        _check_scalar(value, schema, place)
        return _FORMATS[schema["format"]](value) if "format" in schema else value

    def _table(self, value: dict[str, Any], schema: Mapping[str, Any], place: TomlPlace) -> dict[str, Any]:
        """Return the values of a table by key, with `_` for `-` in the keys that the schema names."""
        properties, required = dict(schema.get("properties", {})), list(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        for rule in schema.get("allOf", ()):
            if all(value.get(key) in wanted["enum"] for key, wanted in rule["if"]["properties"].items()):
                then = self.definitions[rule["then"]["$ref"].rpartition("/")[2]]
                properties, others = {**then["properties"], **properties}, then["additionalProperties"]
                required += then.get("required", ())
        if others is False:
            for key in (key for key in value if key not in properties):
                raise _unknown_key(key, properties, place)
        if missing := [key for key in required if key not in value]:
            more = f", and {_listed(missing[1:])} too" if missing[1:] else ""
            raise ConfigError(
                f"is missing{more}",
                where=str(place.at(missing[0])),
                hint=f"add {'them' if more else 'it'}; {self.docs} has the values",
            )
        choices = [key for choice in schema.get("oneOf", ()) for key in choice["required"]]
        given = [key for key in choices if key in value]
        if choices and len(given) != 1:
            hint = f"{'keep' if given else 'add'} one of them"
            got = " and ".join(given) or "none"
            raise ConfigError(f"expected {schema['description']}, got {got}", where=str(place), hint=hint)
        for key in value if "propertyNames" in schema else ():
            self.read(key, schema["propertyNames"], place.at(key))
        return {
            (key.replace("-", "_") if key in properties else key): self.read(
                item, properties.get(key, others), place.at(key)
            )
            for key, item in value.items()
        }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _unknown_key(key: str, known: Iterable[str], place: TomlPlace) -> ConfigError:
    meant = nearest(key, known)
    return ConfigError(
        f"unknown key; expected one of {_listed(known)}",
        where=str(place.at(key)),
        hint=f"did you mean `{meant}`?" if meant else "remove it",
    )


def _check_type(value: Any, allowed: list[str], place: TomlPlace) -> None:
    kind = _KINDS.get(type(value), "date")
    if kind in allowed:
        return
    expected = " or ".join(_ARTICLES.get(name, f"a {name}") for name in allowed)
    hints = {"string": "write it in quotes", "array": f"write brackets around it: `{place.key} = [ … ]`"}
    raise ConfigError(
        f"expected {expected}, got {_ARTICLES.get(kind, f'a {kind}')}",
        where=str(place.as_table() if allowed == ["object"] else place),
        hint=hints.get(allowed[0], f"write {expected} here"),
    )


def _check_scalar(value: str | int, schema: Mapping[str, Any], place: TomlPlace) -> None:
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        expected = f"an integer from {schema['minimum']} to {schema['maximum']}"
        raise ConfigError(f"{value} is not {expected}", where=str(place), hint=f"write {expected}")
    if value not in schema.get("enum", (value,)):
        meant = nearest(str(value), schema["enum"])
        raise ConfigError(
            f"{value!r} is not {schema['title']}; expected one of {_listed(schema['enum'])}",
            where=str(place),
            hint=f"did you mean `{meant}`?" if meant else f"choose {schema['title']} from the list",
        )
    # Python's `$` also matches before a newline at the end, other than that of JSON schemas.
    if "pattern" in schema and not re.fullmatch(schema["pattern"], str(value)):
        expected = schema["description"]
        raise ConfigError(f"{value!r} is not {expected}", where=str(place), hint=f"write {expected}")
