"""Binaries -> `build/<variant>/`: metadata, digest, and the swap into place."""
