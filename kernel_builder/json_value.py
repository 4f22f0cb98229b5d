"""Values of the builder in JSON's types, as `--json` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from kernel_format.release import Release, Version
from kernel_format.variant import Backend


def json_value(value: Any, separator: str = "-") -> Any:
    """Return a value with dataclasses as objects, `separator` for `_` in their fields, and other values as texts."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, Backend):
        return by_field(value, separator)
    if isinstance(value, Mapping):
        return {str(key): json_value(item, separator) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, (Release, Version)):
        return [json_value(item, separator) for item in value]
    return str(value)


def by_field(value: Any, separator: str = "-") -> dict[str, Any]:
    """Return a dataclass as an object, also one with a method `as_dict`."""
    return {
        field.name.replace("_", separator): json_value(getattr(value, field.name), separator) for field in fields(value)
    }
