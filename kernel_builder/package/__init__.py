"""Binaries -> `build/<variant>/`: metadata, digest, and the atomic replacement of packages."""
