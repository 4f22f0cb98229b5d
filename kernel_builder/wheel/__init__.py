"""Packages of a project -> wheels for Python's package index, one for each platform."""
