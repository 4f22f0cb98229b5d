"""docs/models.md is what benchmarks/models_page.py writes from the results."""

from __future__ import annotations

import pytest

from tests.support.places import ROOT


def test_the_page_is_written_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import models_page

    assert models_page.main_page(models_page.read_results()) == (ROOT / "docs/models.md").read_text()
