"""Answers of processes with untrusted code, which may send anything, or a byte now and then for ever."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_CHECK_SECONDS = 0.25


def read_answer(connection: socket.socket, seconds: float, most: int, check: Callable[[], None] = lambda: None) -> Any:
    """Return the value of an answer: one line of JSON. `check` is called now and then, and may raise.

    Raises:
        TimeoutError: If it is not complete after so many seconds.
        EOFError: If the process has closed the connection.
        ValueError: If it is longer than `most` bytes, or not one line of JSON with finite numbers.
    """
    line, now = bytearray(), time.monotonic()
    end, due = now + seconds, now + _CHECK_SECONDS
    while not line.endswith(b"\n"):
        if now >= end:
            raise TimeoutError
        if now >= due:
            check()
            due = time.monotonic() + _CHECK_SECONDS
        connection.settimeout(max(min(end, due) - now, 0.001))
        with suppress(TimeoutError):
            part = connection.recv(1 << 16, socket.MSG_PEEK)  # without the start of the next answer
            if not part:
                raise EOFError
            line += connection.recv(part.find(b"\n") + 1 or len(part))
        if len(line) > most:
            raise ValueError(f"more than {most} bytes")
        now = time.monotonic()
    try:
        return json.loads(line, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def has_form(value: Any, form: Any) -> bool:
    """Return whether a value of JSON has a form.

    Args:
        form: A type, a form for each key of an object, a list with the form of all items, or a longer one of each item.
    """
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key in value and has_form(value[key], form[key]) for key in form)
    if isinstance(form, list):
        forms = form * len(value) if isinstance(value, list) and len(form) == 1 else form
        return isinstance(value, list) and len(value) == len(forms) and all(map(has_form, value, forms))
    return isinstance(value, form)
