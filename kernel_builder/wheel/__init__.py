"""Wheels of a project's packages for Python's package index, one for each platform."""
