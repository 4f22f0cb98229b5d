"""Build, check and publish compute kernels for PyTorch."""

__version__ = "0.1.0"
