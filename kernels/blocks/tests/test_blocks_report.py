"""The report of `accelerate`, and the errors of the public functions."""

import json
import re
from pathlib import Path

import diffusers
import pytest
import torch
from example_models import DEVICE, ROUNDING, difference, left, ltx, ltx_pipeline, qwen3, run
from torch import nn


class UnknownNorm(nn.Module):
    def forward(self, x):
        return x


class OwnLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) + 1


def test_report_counts_what_was_replaced_and_left(blocks):
    model = nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8), nn.LayerNorm((4, 8)), UnknownNorm(), OwnLayerNorm(8))
    report = blocks.accelerate(model)
    assert report.replaced == {("RMSNorm", "RMSNorm"): 2}
    assert report.kernels == {("RMSNorm", "RMSNorm"): ["rmsnorm"]}
    assert dict(report.left) == {
        ("LayerNorm", "it normalizes over several dimensions"): 1,
        ("UnknownNorm", "it computes no norm that a kernel does"): 1,
        ("OwnLayerNorm", "it computes no norm that a kernel does"): 1,
    }
    assert str(report).splitlines()[:6] == [
        f"2 modules replaced, 3 left as before; kernels for {DEVICE}",
        "replaced:",
        "     2 x RMSNorm       RMSNorm (rmsnorm)",
        "left:",
        "     1 x LayerNorm     it normalizes over several dimensions",
        "     1 x UnknownNorm   it computes no norm that a kernel does",
    ]


@pytest.mark.parametrize("make", [ltx, qwen3])
def test_nothing_is_left_in_a_public_model(blocks, make):
    model, _ = make()
    report = blocks.accelerate(model)
    assert report.replaced and not left(report)
    assert report.kernels.keys() == report.replaced.keys()


def test_report_is_json_with_versions(blocks):
    model, inputs = ltx(layers=1)
    report = blocks.accelerate(model, check=inputs)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["versions"]["diffusers"] == diffusers.__version__
    assert {"blocks", "adaln", "geglu", "rmsnorm", "rope3d", "torch", "transformers"} <= data["versions"].keys()
    assert data["device"] == DEVICE and data["notes"] == []
    assert data["check"]["kept"] in ("eager", "accelerated")
    counted = sum(entry["count"] for entry in data["replaced"] + data["left"])
    assert counted == sum(report.replaced.values()) + sum(report.left.values())


@pytest.mark.parametrize(
    "version, note",
    [
        ("0.99.0.dev0", "diffusers 0.99.0.dev0 is newer than {1}, the newest release that was tested"),
        ("0.30.2", "diffusers 0.30.2 is older than {0}, the oldest release that was tested"),
    ],
)
def test_untested_release_is_noted(blocks, monkeypatch, version, note):
    tested = blocks.report.TESTED["diffusers"]
    monkeypatch.setattr(diffusers, "__version__", version)
    report = blocks.accelerate(nn.RMSNorm(8, device=DEVICE))
    assert report.notes == [note.format(*tested)]
    assert note.format(*tested) in str(report)


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_tested_releases_are_those_of_the_card(blocks, library):
    card = (Path(__file__).parents[1] / "CARD.md").read_text()
    (row,) = re.findall(rf"^\| {library} \| (.*) \|$", card, re.MULTILINE)
    releases = [release.rpartition(".")[0] for release in row.split(", ")]
    assert (releases[0], releases[-1]) == blocks.report.TESTED[library]


def test_second_call_changes_nothing(blocks):
    model, inputs = ltx()
    first = blocks.accelerate(model)
    classes = [type(module) for module in model.modules()]
    expected = run(model, inputs)
    second = blocks.accelerate(model)
    assert second.replaced == first.replaced and second.left == first.left
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(run(model, inputs), expected)


def test_model_without_known_modules(blocks):
    report = blocks.accelerate(nn.Linear(2, 2))
    assert str(report).startswith("nothing replaced: the model has no module that the kernels know")
    blocks.restore(nn.Linear(2, 2))


def test_model_on_a_device_that_the_kernels_are_not_for(blocks, monkeypatch):
    model, inputs = ltx()
    expected = run(model, inputs)
    monkeypatch.setattr(blocks.kernel_set, "DEVICE", "xpu")
    report = blocks.accelerate(model)
    assert report.notes == [f"the kernels are for xpu, and the model is on {DEVICE}: there it runs as before"]
    assert torch.equal(run(model, inputs), expected)


def test_pipeline(blocks):
    pipeline, video = ltx_pipeline()
    expected = video()
    report = blocks.accelerate(pipeline)
    assert {"LTXVideoTransformerBlock", "T5LayerNorm"} <= {name for name, _ in report.replaced}
    assert difference(video(), expected) < ROUNDING
    blocks.restore(pipeline)
    assert torch.equal(video(), expected)


def test_check_of_a_pipeline(blocks):
    """It runs the denoiser alone. The other models are accelerated without a check."""
    pipeline, _ = ltx_pipeline()
    before = blocks.accelerate(pipeline)
    report = blocks.accelerate(pipeline, check=ltx()[1])
    assert report.check.accelerated_error < 1e-6
    assert (report.replaced + report.left).total() == (before.replaced + before.left).total()
    assert any(name == "T5LayerNorm" for name, _ in report.replaced)


def test_check_of_a_pipeline_without_denoiser(blocks):
    text = TextToAudio()
    with pytest.raises(
        ValueError, match=r"blocks: check needs a pipeline with a transformer or a unet, .* has vocoder;"
    ):
        blocks.accelerate(text, check={})


class TextToAudio(diffusers.DiffusionPipeline):
    def __init__(self):
        super().__init__()
        self.vocoder = nn.LayerNorm(8)

    @property
    def components(self):
        return {"vocoder": self.vocoder}


@pytest.mark.parametrize("function", ["accelerate", "restore"])
def test_wrong_model(blocks, function):
    with pytest.raises(TypeError, match=r"blocks: model must be a torch\.nn\.Module or a pipeline, not str"):
        getattr(blocks, function)("a model")


def test_wrong_check(blocks):
    model, _ = ltx()
    with pytest.raises(TypeError, match=r"blocks: check must be a dict of keyword arguments, .* not Tensor"):
        blocks.accelerate(model, check=torch.ones(1))
    assert all(type(module).__mro__[1] is not blocks.replacements._Copied for module in model.modules())
