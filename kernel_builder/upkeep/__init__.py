"""Keeps the builder's tables up to date with the releases of Torch and CUDA."""
