"""Attention masks of transformers in CUDA graphs: none where the same call makes none outside of graphs.

Without a mask and a cache, transformers reads the position ids to see whether they are of one text: its attention is
causal then, which the attention function computes without a mask, and faster. A capture does not allow to read them,
so a mask would be made. Position ids that the model has made itself are of one text.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from . import kernel_set

POSITIONS = "position_ids"


def makes_mask(function: Any) -> bool:
    """Return whether a function is one of transformers that makes a mask, of position ids among others."""
    is_theirs = isinstance(function, FunctionType) and function.__module__ == "transformers.masking_utils"
    return is_theirs and POSITIONS in inspect.signature(function).parameters


def masked(function: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` in a forward whose caller has `given` position ids, or None.

    If a user has replaced the function since the forward was rewritten, that function gets its own arguments.
    """
    if given is None and POSITIONS in kwargs and kernel_set.is_capturing() and makes_mask(function):
        kwargs[POSITIONS] = None
    return function(*args, **kwargs)
