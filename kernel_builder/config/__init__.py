"""Reads `build.toml` as a project, and derives the variants that it must offer from the support matrix."""
