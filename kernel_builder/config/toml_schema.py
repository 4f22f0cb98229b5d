"""Readers of TOML values: tables with known keys, arrays, strings, versions, paths. Independent of kernels.

A reader takes a parsed value and its `TomlPlace`, and returns the value that the program uses. It raises `ConfigError`
if the value is not valid for its key. Its `schema` is a JSON schema that accepts each value that the reader accepts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from kernel_format.errors import ConfigError
from kernel_format.release import Release, Version

_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "a table",
}
# The largest integer that every TOML parser accepts. Python's accepts larger ones.
_LARGEST = 2**63 - 1


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


Reader = Callable[[Any, TomlPlace], Any]


@dataclass(frozen=True)
class SchemaReader:
    """A function from a parsed value and its place to a value of the program, and the JSON schema of parsed values."""

    read: Reader
    schema: Mapping[str, Any]

    def __call__(self, value: Any, place: TomlPlace) -> Any:
        return self.read(value, place)


def with_schema(schema: Mapping[str, Any]) -> Callable[[Reader], SchemaReader]:
    """Return a decorator that adds a schema to a reader."""
    return lambda read: SchemaReader(read, schema)


def schema_of(read: Reader) -> Mapping[str, Any]:
    """Return the schema of a reader; one that accepts all values if it has none."""
    return read.schema if isinstance(read, SchemaReader) else {}


@dataclass(frozen=True)
class Key:
    """One key of a table: the reader of its value, and whether the key is required."""

    read: Reader
    required: bool = False


def table_schema(keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the schema of a table with these keys and no others."""
    required = sorted(name for name, key in keys.items() if key.required)
    properties = {name: schema_of(key.read) for name, key in keys.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that `name` probably misspells."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _wrong_type(value: Any, place: TomlPlace, expected: str, hint: str | None = None) -> ConfigError:
    got = _TYPES.get(type(value), "a date or time")
    return ConfigError(f"expected {expected}, got {got}", where=str(place), hint=hint or f"write {expected} here")


def table(keys: Mapping[str, Key], make: Callable[[dict[str, Any]], Any] = dict) -> Reader:
    """Read a table with these keys and no others.

    The reader returns `make(values)`: the values of the present keys, with `_` for `-` in their names.
    """

    def read(value: Any, place: TomlPlace) -> Any:
        place = place.as_table()
        if not isinstance(value, dict):
            raise _wrong_type(value, place, "a table")
        for key in value:
            if key not in keys:
                meant = nearest(key, keys)
                raise ConfigError(
                    f"unknown key; expected one of {_listed(keys)}",
                    where=str(place.at(key)),
                    hint=f"did you mean `{meant}`?" if meant else "remove it",
                )
        if missing := [name for name, key in keys.items() if key.required and name not in value]:
            others = f", and {_listed(missing[1:])} too" if missing[1:] else ""
            raise ConfigError(
                f"is missing{others}",
                where=str(place.at(missing[0])),
                hint=f"add {'them' if others else 'it'}; docs/build-toml.md has the values",
            )
        return make({name.replace("-", "_"): keys[name].read(item, place.at(name)) for name, item in value.items()})

    return SchemaReader(read, table_schema(keys))


def tables(read_one: Reader) -> Reader:
    """Read a table of named tables. The reader returns a dict of name -> value that `read_one` returned."""

    def read(value: Any, place: TomlPlace) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong_type(value, place.as_table(), "a table")
        return {name: read_one(item, place.as_table().at(name)) for name, item in value.items()}

    return SchemaReader(read, {"type": "object", "additionalProperties": schema_of(read_one)})


def list_of(read_one: Reader, *, least: int = 0, hint: str | None = None) -> Reader:
    """Read an array of at least `least` values. The reader returns a tuple."""

    def read(value: Any, place: TomlPlace) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong_type(value, place, "an array", f"write brackets around it: `{place.key} = [ … ]`")
        if len(value) < least:
            raise ConfigError("is an empty array", where=str(place), hint=hint)
        return tuple(read_one(item, place) for item in value)

    schema = {"type": "array", "items": schema_of(read_one)}
    return SchemaReader(read, {**schema, "minItems": least} if least else schema)


@with_schema({"type": "string"})
def text(value: Any, place: TomlPlace) -> str:
    """Read any string."""
    if not isinstance(value, str):
        raise _wrong_type(value, place, "a string", "write it in quotes")
    return value


def matching(pattern: str, expected: str) -> Reader:
    """Read a string that `pattern` matches in full. `expected` describes it, with an example."""
    compiled = re.compile(pattern, re.ASCII)

    def read(value: Any, place: TomlPlace) -> str:
        if not compiled.fullmatch(text(value, place)):
            raise ConfigError(f"{value!r} is not {expected}", where=str(place), hint=f"write {expected}")
        return str(value)

    return SchemaReader(read, {"type": "string", "pattern": f"^(?:{pattern})$", "description": expected})


def one_of(names: Iterable[str], kind: str) -> Reader:
    """Read one of these strings. `kind` describes them, with an article."""
    known = tuple(names)

    def read(value: Any, place: TomlPlace) -> str:
        if text(value, place) not in known:
            meant = nearest(value, known)
            raise ConfigError(
                f"{value!r} is not {kind}; expected one of {_listed(known)}",
                where=str(place),
                hint=f"did you mean `{meant}`?" if meant else f"choose {kind} from the list",
            )
        return str(value)

    return SchemaReader(read, {"enum": list(known)})


@with_schema({"type": "integer", "minimum": 0, "maximum": _LARGEST})
def natural(value: Any, place: TomlPlace) -> int:
    """Read an integer of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(value, place, "an integer")
    if not 0 <= value <= _LARGEST:
        raise ConfigError(
            f"{value} is not an integer from 0 to {_LARGEST}", where=str(place), hint="write an integer of at least 0"
        )
    return value


_VERSION = r"[0-9]{1,9}(\.[0-9]{1,9})*"


@with_schema({"type": "string", "pattern": f"^{_VERSION}$"})
def version(value: Any, place: TomlPlace) -> Version:
    """Read a version of any number of parts, written as a string."""
    if not isinstance(value, str):
        raise _wrong_type(value, place, "a string", 'versions are strings: write "2.10", in quotes')
    if not re.fullmatch(_VERSION, value):
        raise ConfigError(
            f'{value!r} is not a version like "2.10"', where=str(place), hint="write numbers with dots between them"
        )
    return Version.parse(value)


@with_schema({"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"})
def release(value: Any, place: TomlPlace) -> Release:
    """Read a version whose major and minor number name a release, written as a string."""
    parts = version(value, place)
    if len(parts) > 2:
        raise ConfigError(
            f'{value!r} is not a release of two numbers like "2.10"',
            where=str(place),
            hint="write the major and the minor number, without a patch number",
        )
    return Release(*parts)


@with_schema({"type": "string", "minLength": 1})
def inner_path(value: Any, place: TomlPlace) -> str:
    """Read a relative path without `..`. Return it without a leading `./`."""
    path = PurePosixPath(text(value, place))
    if not value or path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"{value!r} is not a path inside the project",
            where=str(place),
            hint="write it relative to the directory of build.toml, without `..`",
        )
    if not value.isprintable():
        raise ConfigError(f"{value!r} has a control character", where=str(place), hint="rename the file")
    return path.as_posix()
