import torch  # before _C, which needs its libraries

from ._C import scaled_add

__all__ = ["scaled_add"]
