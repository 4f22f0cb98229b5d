"""Porting: a `setup.py` of `torch.utils.cpp_extension` -> a first `build.toml`. The `setup.py` runs in a sandbox."""
