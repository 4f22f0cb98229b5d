"""What a TOML table may hold: keys, and a reader for each value. Knows nothing of kernels.

A reader takes a parsed value and the `TomlPlace` where it stands, and returns what the program uses instead of it. It
raises `ConfigError` if the value is not what the key may hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from kernel_builder.config.variant import Release
from kernel_builder.errors import ConfigError

_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "a table",
}
# The largest integer that TOML promises; Python's parser goes beyond.
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class TomlPlace:
    """Where a value stands: `build.toml: [kernel.relu] src`."""

    file: str
    table: str = ""
    key: str = ""

    def __str__(self) -> str:
        if not self.table:  # the keys of the document itself are tables
            return f"{self.file}: [{self.key}]" if self.key else self.file
        return f"{self.file}: [{self.table}] {self.key}".rstrip()

    def at(self, key: str) -> TomlPlace:
        """A key of this table."""
        return replace(self, key=key)

    def as_table(self) -> TomlPlace:
        """The table that this key holds."""
        return TomlPlace(self.file, f"{self.table}.{self.key}" if self.table else self.key)


Reader = Callable[[Any, TomlPlace], Any]


@dataclass(frozen=True)
class Key:
    """One key of a table: what reads its value, and whether it must be there."""

    read: Reader
    required: bool = False


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is probably a misspelling of."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _wrong_type(value: Any, place: TomlPlace, expected: str, hint: str | None = None) -> ConfigError:
    got = _TYPES.get(type(value), "a date or time")
    return ConfigError(f"expected {expected}, got {got}", where=str(place), hint=hint or f"write {expected} here")


def table(keys: Mapping[str, Key]) -> Reader:
    """A table with these keys and no others.

    The reader returns what was read of the keys that are there, by key with `_` for `-`: the arguments of a
    dataclass.
    """

    def read(value: Any, place: TomlPlace) -> dict[str, Any]:
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
        for name, key in keys.items():
            if key.required and name not in value:
                raise ConfigError(
                    "is missing", where=str(place.at(name)), hint="add it: docs/build-toml.md says what it may hold"
                )
        return {name.replace("-", "_"): keys[name].read(item, place.at(name)) for name, item in value.items()}

    return read


def tables(read_one: Reader) -> Reader:
    """A table of tables, each with a name of its own. The reader returns name -> what `read_one` returned."""

    def read(value: Any, place: TomlPlace) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong_type(value, place.as_table(), "a table")
        return {name: read_one(item, place.as_table().at(name)) for name, item in value.items()}

    return read


def list_of(read_one: Reader, *, least: int = 0, hint: str | None = None) -> Reader:
    """An array of values of one kind, at least `least` of them. The reader returns a tuple."""

    def read(value: Any, place: TomlPlace) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong_type(value, place, "an array", f"put it in brackets: `{place.key} = [ … ]`")
        if len(value) < least:
            raise ConfigError("is an empty array", where=str(place), hint=hint)
        return tuple(read_one(item, place) for item in value)

    return read


def text(value: Any, place: TomlPlace) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise _wrong_type(value, place, "a string", "put it in quotes")
    return value


def matching(pattern: str, expected: str) -> Reader:
    """A string that `pattern` matches in full. `expected` says what that is, with an example."""
    compiled = re.compile(pattern, re.ASCII)

    def read(value: Any, place: TomlPlace) -> str:
        if not compiled.fullmatch(text(value, place)):
            raise ConfigError(f"{value!r} is not {expected}", where=str(place), hint=f"write {expected}")
        return str(value)

    return read


def one_of(names: Iterable[str], what: str) -> Reader:
    """One of these strings; `what` says what they are, with its article."""
    known = tuple(names)

    def read(value: Any, place: TomlPlace) -> str:
        if text(value, place) not in known:
            meant = nearest(value, known)
            raise ConfigError(
                f"{value!r} is not {what}; expected one of {_listed(known)}",
                where=str(place),
                hint=f"did you mean `{meant}`?" if meant else f"choose {what} from the list",
            )
        return str(value)

    return read


def natural(value: Any, place: TomlPlace) -> int:
    """An integer from 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(value, place, "an integer")
    if not 0 <= value <= _LARGEST:
        raise ConfigError(f"{value} is not an integer from 0", where=str(place), hint="write an integer from 0")
    return value


def release(value: Any, place: TomlPlace) -> Release:
    """A `major.minor` version, as a string."""
    if not isinstance(value, str):
        raise _wrong_type(value, place, "a string", 'versions are strings: write "2.10", in quotes')
    if not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", value):
        raise ConfigError(
            f'{value!r} is not a version of two numbers like "2.10"',
            where=str(place),
            hint="write the major and the minor number, without a patch level",
        )
    return Release.parse(value)


def inner_path(value: Any, place: TomlPlace) -> str:
    """A relative POSIX path that does not leave the project by its own words. The reader returns it without `./`."""
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
