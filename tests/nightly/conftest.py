"""Attacks and random kills, which `make nightly` runs: over loopback only, each for NIGHTLY_SECONDS (default: 120)."""

from __future__ import annotations

import os

from tests.support.running_hub import hub, start_hub

__all__ = ["hub", "start_hub"]

SECONDS = float(os.environ.get("NIGHTLY_SECONDS", "120"))
