"""The options that limit what an agent may use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def limit_option(name: str, default: float, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option of a limit, a number above zero."""
    above_zero = click.FloatRange(min=0, min_open=True)
    return click.option(name, type=above_zero, default=default, show_default=True, help=text)


minutes_option = limit_option("--minutes", 30.0, "The longest call of an agent.")
