"""The tests of skills use the scripted agents, the quick judge and the fixtures of the judge's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "kernel-judge" / "tests"))
