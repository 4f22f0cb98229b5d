"""Fixtures of the tests that build for other platforms and run what they build."""

from tests.integration.build_command.conftest import cache, kernel_builder, project

__all__ = ["cache", "kernel_builder", "project"]
