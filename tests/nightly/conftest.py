"""Attacks and random kills, which `make nightly` runs: over loopback only, each for NIGHTLY_SECONDS (default: 120)."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("NIGHTLY_SECONDS", "120"))
