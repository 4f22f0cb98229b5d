"""Xet uploads: their formats, and the names of xorbs."""
