import platform as _platform

import torch

try:
    from . import $namespace
except ImportError as error:
    if _platform.machine() == "$machine":
        raise
    raise ImportError(
        f"this package is for $machine, and this machine is {_platform.machine()}: load the variant for this machine"
    ) from error

