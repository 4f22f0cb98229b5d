"""Calls of a Hub that it refuses for the moment, and that are repeated."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from kernel_format.errors import HubError

_ATTEMPTS = 5
_LONGEST_WAIT = 300  # seconds; the public Hub counts requests in windows of this length
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class RefusedForNow(HubError):
    """The Hub has changed nothing; the call may succeed `wait` seconds later."""

    wait: float = 0


class Conflict(RefusedForNow):
    """Another publisher has changed the branch since it was read."""


class RateLimited(RefusedForNow):
    """The Hub limits the requests (status 429)."""

    def __init__(self, message: str, where: str, headers: Mapping[str, str]) -> None:
        asked = re.search(r"(?:^|;t=)(\d+)$", headers.get("Retry-After") or headers.get("RateLimit", ""))
        self.wait = int(asked[1]) if asked else math.inf
        hint = f"wait {f'{asked[1]} seconds' if asked else 'a minute'}, and run the same command again"
        super().__init__(message, where=where, hint=hint)
        self.args = message, where, dict(headers)  # for other processes


def repeated(error: type[RefusedForNow]) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator: a function that raises this error is called again, up to 5 times in all."""

    def decorated(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return function(*args, **kwargs)
                except error as refusal:
                    if refusal.wait > _LONGEST_WAIT:
                        raise
                    logging.getLogger(__name__).warning("%s; repeated in %d s", refusal, refusal.wait)
                    time.sleep(refusal.wait)
            return function(*args, **kwargs)

        return call

    return decorated
