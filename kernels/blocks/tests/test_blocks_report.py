"""The report of `accelerate`, and the errors of the public functions."""

import copy
import json

import diffusers
import pytest
import torch
from example_models import ROUNDING, ltx, ltx_pipeline, own, run
from model_cases import DEVICE, error
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")


class OwnLayerNorm(nn.LayerNorm):
    def forward(this, x):  # recognition needs no name `self`
        return super().forward(x) + 1


class LayerNorm2d(nn.Module):
    """Over the channels of an image."""

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) * x.var(1, keepdim=True).rsqrt()


class Reordering(nn.Module):
    """Rotates pairs of neighbors, and puts them half a head apart, as DeepSeek does."""

    def forward(self, x):
        cos, sin = x[0, :, :4].cos(), x[0, :, 4:].sin()
        return torch.cat((x[..., ::2] * cos - x[..., 1::2] * sin, x[..., ::2] * sin + x[..., 1::2] * cos), -1)


class Matrices(nn.Module):
    """Multiplies pairs of neighbors by matrices, as HiDream does."""

    def forward(self, x):
        matrices, pairs = x[0].cos().view(4, 4, 1, 2), x.view(2, 4, 4, 1, 2)
        columns = matrices.expand(4, 4, 2, 2).unbind(-1)
        return (columns[0] * pairs[..., 0] + columns[1] * pairs[..., 1]).flatten(-2)


@torch.no_grad()
def test_report_grows_with_traces(blocks):
    norms = nn.RMSNorm(8, 1e-6), nn.RMSNorm(8, 1e-6), nn.LayerNorm((4, 8)), LayerNorm2d(), OwnLayerNorm(8)
    model = nn.Sequential(*norms, weight_norm(nn.Linear(8, 8)), Reordering(), Matrices()).to(DEVICE)
    report = blocks.accelerate(model)
    assert str(report).startswith("nothing replaced so far: Torch has traced no call; kernels for ")
    model(torch.randn(2, 4, 8, device=DEVICE))
    assert report.replaced == {("RMSNorm", "RMSNorm"): 2, ("OwnLayerNorm", "LayerNorm, with modulation or without"): 1}
    assert [entry["kernels"] for entry in report.to_dict()["replaced"]] == [["rmsnorm"], ["adaln"]]
    assert dict(report.left) == {
        ("LayerNorm", "no kernel computes this norm"): 1,
        ("LayerNorm2d", "no kernel computes this norm"): 1,
        ("Reordering", "it rotates pairs as no kernel does"): 1,
        ("Matrices", "it multiplies pairs by matrices that need not rotate them"): 1,
    }
    assert str(report).splitlines()[:8] == [
        f"3 modules replaced, 4 left as before; kernels for {DEVICE}",
        "replaced:",
        "     2 x RMSNorm       RMSNorm (rmsnorm)",
        "     1 x OwnLayerNorm  LayerNorm, with modulation or without (adaln)",
        "left:",
        "     1 x Matrices      it multiplies pairs by matrices that need not rotate them",
        "     1 x Reordering    it rotates pairs as no kernel does",
        "     1 x LayerNorm     no kernel computes this norm",
    ]
    assert repr(report) == str(report)  # which a notebook shows


def test_report_is_json_with_versions(blocks):
    model, inputs = own()
    report = blocks.accelerate(model, check=inputs)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["versions"]["diffusers"] == diffusers.__version__
    assert {"blocks", "adaln", "geglu", "rmsnorm", "rope3d", "torch", "transformers"} <= data["versions"].keys()
    assert data["device"] == DEVICE and data["notes"] == []
    assert data["check"]["kept"] in ("eager", "accelerated")
    counted = sum(entry["count"] for entry in data["replaced"] + data["left"])
    assert counted == sum(report.replaced.values()) + sum(report.left.values()) > 0


def test_a_model_that_no_kernel_takes_is_noted(blocks, monkeypatch):
    note = "the model is in float64, which the kernels do not support: it runs without them"
    model, inputs = own()
    assert blocks.accelerate(copy.deepcopy(model).double()).notes == [note]
    for module in (blocks.kernel_set, blocks.editing):
        monkeypatch.setattr(module, "DEVICE", "xpu")
    expected, report = run(model, inputs), blocks.accelerate(model)
    assert report.notes == [f"the kernels are for xpu, and the model is on {DEVICE}: it runs without them"]
    assert torch.equal(run(model, inputs), expected) and not report.replaced


def test_pipeline(blocks):
    """A check runs the denoiser alone. The other models are accelerated without one."""
    pipeline, video = ltx_pipeline()
    expected = video()
    report = blocks.accelerate(pipeline, scope="blocks")
    assert error(video(), expected) < ROUNDING
    assert ("LTXVideoTransformerBlock", "residual sum with gate") in report.replaced
    assert "residual sum with gate (adaln)" in str(report)
    assert blocks.accelerate(pipeline, check=ltx()[1], scope="blocks").check.accelerated_error < 1e-6
    assert list(blocks.accelerate(pipeline, graphs=True).graphs) == ["transformer"]
    blocks.restore(pipeline)
    assert torch.equal(video(), expected)


class TextToAudio(diffusers.DiffusionPipeline):
    def __init__(self):
        super().__init__()
        self.vocoder = nn.LayerNorm(8)

    @property
    def components(self):
        return {"vocoder": self.vocoder}


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("a model", {}, TypeError, r"blocks: model must be a torch\.nn\.Module or a pipeline, not str"),
        (None, {"check": torch.ones(1)}, TypeError, "check must be True, a dict, a tuple or a function, not Tensor"),
        (None, {"check": False}, TypeError, "check must be True, a dict, a tuple or a function, not bool"),
        (None, {"check": True, "graphs": True}, ValueError, "check=True excludes graphs=True and logits=False"),
        (None, {"check": True, "logits": False}, ValueError, "check=True excludes graphs=True and logits=False"),
        (TextToAudio(), {"check": {}}, ValueError, "check needs a transformer or a unet; check each of vocoder alone"),
        (None, {"scope": "layers"}, ValueError, 'scope must be "model" or "blocks", not \'layers\''),
        (None, {"scope": "model", "graphs": True}, ValueError, 'graphs=True needs scope="blocks", or none'),
        (None, {"logits": False, "graphs": True}, ValueError, 'logits=False needs scope="model", without graphs'),
        (None, {"logits": False, "scope": "blocks"}, ValueError, 'logits=False needs scope="model", without graphs'),
    ],
)
def test_wrong_arguments(blocks, model, options, error, message):
    """They leave the model as it is."""
    layer = nn.RMSNorm(4)
    with pytest.raises(error, match=message):
        blocks.accelerate(layer if model is None else model, **options)
    assert layer._compiled_call_impl is None
    if isinstance(model, str):
        with pytest.raises(error, match=message):
            blocks.restore(model)
