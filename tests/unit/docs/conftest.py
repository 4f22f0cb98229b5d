"""Fixtures of these tests."""

from tests.support.sample_report import report

__all__ = ["report"]
