"""Compare rotations with the code of models."""

import pytest
import torch
from reference_rope3d import GRID, TOKENS, assert_agrees, assert_as_good, kernel, ltx_angles, points, wan_angles
from testing import DEVICE, DTYPES, random


def flux(x, cos, sin):
    """The code of HunyuanVideo and CogVideoX, and for [B, S, C] of LTX-Video."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(-2)
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def llama(x, cos, sin):
    """Rotate `x` [B, H, S, D] in its dtype, which the tables have as well."""
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)


def twice(angles):
    return (f(angles).float().repeat_interleave(2, -1).to(DEVICE) for f in (torch.cos, torch.sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2048, 130])
def test_ltx(dim, dtype):
    q, k = (random(1, TOKENS, dim, dtype=dtype) for _ in range(2))
    fractions = [p / size for p, size in zip(points(GRID), GRID)]
    cos, sin = twice(ltx_angles([2 * f - 1 for f in fractions], dim))
    form = {"order": "in_turn", "layout": "bsc"}
    scale = [2 / size for size in GRID]
    for own in (
        kernel.rope3d(q, k, GRID, scale=scale, offset=-1, **form),
        kernel.rope3d(q, k, positions=[f.to(DEVICE) for f in fractions], scale=2, offset=-1, **form),
        kernel.apply_rotary(q, k, cos, sin, layout="bsc"),
    ):
        for out, x in zip(own, (q, k)):
            assert_agrees(out, flux(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hunyuan(dtype):
    """Text tokens, which are not rotated, come after those of the video, or before them as in Flux and CogVideoX."""
    text, widths = 7, (16, 56, 56)
    q, k = (random(1, TOKENS + text, 2, 128, dtype=dtype) for _ in range(2))
    cos, sin = twice(wan_angles(points(GRID), widths, (256.0,) * 3))
    video = [x[:, :TOKENS] for x in (q, k)]
    for out, x in zip(kernel.rope3d(*video, GRID, widths=widths, theta=256), video):
        assert_agrees(out, flux(x, cos, sin))
    for out, x in zip(kernel.rope3d(q, k, GRID, widths=widths, theta=256, prefix=text), (q, k)):
        assert torch.equal(out[:, :text], x[:, :text])
        assert_agrees(out[:, text:], flux(x[:, text:], cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_llama(dtype):
    """The model rounds its products, too; with a coarse dtype the kernel has the smaller error."""
    q, k = random(2, 4, 50, 128, dtype=dtype), random(2, 2, 50, 128, dtype=dtype)
    angles = torch.arange(50, dtype=torch.float64)[:, None] * 5e5 ** (torch.arange(64, dtype=torch.float64) / -64)
    cos, sin = (f(torch.cat([angles] * 2, -1)).to(DEVICE, dtype).expand(2, -1, -1) for f in (torch.cos, torch.sin))
    for out, x in zip(kernel.apply_rotary(q, k, cos, sin, pairs="half", layout="bhsd"), (q, k)):
        expected = llama(x, cos, sin)
        if dtype == torch.float32:
            assert_agrees(out, expected)
        exact = llama(x.double(), cos.double(), sin.double())
        assert (out.double() - exact).norm() <= 1.1 * (expected.double() - exact).norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_qwen_vl(dtype):
    """Positions on three axes for each token, and one sequence of frequencies over the sections."""
    sections, tokens = (16, 24, 24), 50
    q, k = random(2, 4, tokens, 128, dtype=dtype), random(2, 2, tokens, 128, dtype=dtype)
    positions = torch.randint(0, 2000, (3, 2, tokens))
    ladder = 1e6 ** (torch.arange(64, dtype=torch.float64) / -64)
    angles = positions[..., None].double() * ladder
    joined = torch.cat([part[axis] for axis, part in enumerate(angles.split(sections, -1))], -1)
    cos, sin = (f(torch.cat([joined] * 2, -1)).float().to(DEVICE) for f in (torch.cos, torch.sin))
    form = {"order": "sections", "widths": [2 * n for n in sections], "theta": 1e6, "pairs": "half", "layout": "bhsd"}
    for out, x in zip(kernel.rope3d(q, k, positions=positions.to(DEVICE), **form), (q, k)):
        assert_agrees(out, llama(x.float(), cos, sin).to(dtype))
    q = random(1, 4, TOKENS, 128, dtype=dtype)
    joined = torch.cat([p[:, None] * part for p, part in zip(points(GRID), ladder.split(sections))], -1)
    assert_as_good(kernel.rope3d(q, None, GRID, **form)[0].transpose(1, 2), q.transpose(1, 2), joined, half=True)
