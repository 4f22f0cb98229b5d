"""Fixtures that run a real Hub on a loopback port, each on a directory of its own."""

from tests.support.running_hub import hub, start_hub

__all__ = ["hub", "start_hub"]
