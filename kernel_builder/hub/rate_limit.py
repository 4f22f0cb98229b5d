"""Requests that a Hub answers with status 429 are sent again after the time that it asks for."""

from __future__ import annotations

import logging
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


class RateLimited(HubError):
    """The Hub has refused a request until `wait` seconds later, or for an unknown time."""

    def __init__(self, message: str, where: str, headers: Mapping[str, str]) -> None:
        asked = re.search(r"(?:^|;t=)(\d+)$", headers.get("Retry-After") or headers.get("RateLimit", ""))
        self.wait = int(asked[1]) if asked else None
        hint = f"wait {f'{self.wait} seconds' if asked else 'a minute'}, and run the same command again"
        super().__init__(message, where=where, hint=hint)


def sent_again(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Call a method again if the Hub limits its requests. The public client repeats downloads only."""

    @wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for _ in range(_ATTEMPTS - 1):
            try:
                return method(*args, **kwargs)
            except RateLimited as error:
                if error.wait is None or error.wait > _LONGEST_WAIT:
                    raise
                logging.getLogger(__name__).warning("%s; it is sent again in %d s", error, error.wait)
                time.sleep(error.wait)
        return method(*args, **kwargs)

    return call
