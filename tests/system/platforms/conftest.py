"""Fixtures of tests that build for other platforms and run the packages."""

from tests.integration.build_command.conftest import cache, kernel_builder, project

__all__ = ["cache", "kernel_builder", "project"]
