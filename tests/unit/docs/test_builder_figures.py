"""docs/figures.md shows the committed results, and the figures' verdicts follow from their values."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from tests.support.places import ROOT

SOURCE = "rmsnorm/rmsnorm_cuda/forward.cu (cuda 13.0)"
OTHER_SOURCE = "rmsnorm/rmsnorm_cuda/backward.cu (cuda 13.0)"
BINDING = "rmsnorm/torch-ext/torch_binding.cpp (cuda 13.0)"
LINK = "link rmsnorm cuda 13.0"


@pytest.fixture
def builder_figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import builder_figures

    return builder_figures


def test_the_page_is_written_from_the_results(builder_figures: ModuleType) -> None:
    import builder

    report = json.loads((ROOT / "benchmarks/results/builder.json").read_text())
    assert builder.PAGE.markdown(report) == (ROOT / "docs/figures.md").read_text()


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([SOURCE, LINK], "met"),
        ([SOURCE, BINDING, LINK], "met"),
        ([SOURCE, OTHER_SOURCE, BINDING, LINK], "missed"),
        ([SOURCE, BINDING, LINK, "link rmsnorm cpu"], "missed"),
        ([BINDING, LINK], "missed"),
    ],
)
def test_a_changed_source_costs_its_compile_the_binding_and_the_link(
    builder_figures: ModuleType, steps: list[str], verdict: str
) -> None:
    assert builder_figures.one_source_row({"steps": steps}).verdict == verdict


def test_steps_of_every_backend_are_read(builder_figures: ModuleType) -> None:
    import builder_runs

    steps = (SOURCE, "kernel/kernel.cpp (cpu)", "kernel/kernel.cu (rocm 7.2)", "link kernel rocm 7.2")
    output = "".join(f"[{number}/4] {step}\n" for number, step in enumerate(steps, 1))
    assert builder_runs.steps_of(f"2 variants\n{output}[1/1] checking kernel torch-cpu\n") == steps


@pytest.mark.parametrize(("warm", "verdict"), [(6.0, "met"), (6.1, "missed")])
def test_a_warm_cache_takes_at_most_a_tenth(builder_figures: ModuleType, warm: float, verdict: str) -> None:
    values = {"warm-cpu-seconds": warm, "cold-cpu-seconds": 60.0}
    assert builder_figures.warm_cache_row(values).verdict == verdict
