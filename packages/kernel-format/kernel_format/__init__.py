"""The formats of the Kernel Hub: variant names, metadata, digests, signatures, front matter and errors."""
