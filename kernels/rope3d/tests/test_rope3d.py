"""Compare the built kernel with float64, on the GPU if there is one, else on the CPU.

The kernel is loaded from `build/` with the public client, as a user would load it.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel
from torch._subclasses.fake_tensor import FakeTensorMode

PROJECT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GRID = (3, 4, 5)
TOKENS = math.prod(GRID)
# Less than a vector, odd multiples of a pair, not a multiple of a vector, axes that end within a vector, and more than
# the CPU gathers at a time.
DIMS = [2, 6, 10, 16, 44, 64, 128, 130, 1000, 1544]

kernel = get_local_kernel(PROJECT)
ops = kernel.rotary.ops


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


# --- references ------------------------------------------------------------------------------------------------------


def points(grid):
    """Return the index of every token on each axis: [3, tokens]."""
    return torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid)).view(-1, 3).t()


def wan_angles(positions, widths, theta=(10000.0,) * 3):
    """Return the angles [..., tokens, pairs] of axes whose pairs are adjacent."""
    return torch.cat(
        [
            p[..., None] / t ** (torch.arange(0, w, 2, dtype=torch.float64) / max(w, 1))
            for p, w, t in zip(positions, widths, theta)
        ],
        -1,
    )


def ltx_angles(positions, dim, theta=10000.0):
    """Return the angles [..., tokens, pairs] of axes in turn, with zeros in front for the elements left over."""
    steps = torch.linspace(0, 1, dim // 6, dtype=torch.float64)
    ladder = theta**steps * (math.pi / 2)
    angles = torch.stack([p[..., None] * ladder for p in positions], -1).flatten(-2)
    return torch.cat([angles.new_zeros(*angles.shape[:-1], dim % 6 // 2), angles], -1)


def wan_widths(dim):
    return dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6)


def rotated(x, angles, half=False, dtype=torch.float64):
    """Rotate x [B, S, H, D] in `dtype`; round to the dtype of x unless it is float64. `angles` may be (cos, sin)."""
    cos, sin = angles if isinstance(angles, tuple) else (angles.cos(), angles.sin())
    cos, sin = (t.to(x.device, dtype).unsqueeze(-2) for t in (cos, sin))
    turning, staying = x.to(dtype).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = turning.chunk(2, -1) if half else (turning[..., ::2], turning[..., 1::2])
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.cat([a, b], -1) if half else torch.stack([a, b], -1).flatten(-2)
    result = torch.cat([turned, staying], -1)
    return result if dtype == torch.float64 else result.to(x.dtype)


def assert_as_good(actual, x, angles, half=False):
    """Assert that the error of `actual` is at most 1.1 times that of float32 arithmetic, rounded once."""
    exact, eager = rotated(x, angles, half), rotated(x, angles, half, torch.float32)
    assert actual.dtype == x.dtype and actual.shape == x.shape
    scale = torch.finfo(x.dtype).eps
    torch.testing.assert_close(actual.double(), exact, rtol=scale, atol=2 * scale)
    if x.numel() >= 1000:
        assert (actual.double() - exact).norm() <= 1.1 * (eager.double() - exact).norm()


# --- a grid ----------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("half", [False, True])
def test_grid(dim, dtype, half):
    q, k = random(2, TOKENS, 3, dim, dtype=dtype), random(2, TOKENS, 1, dim, dtype=dtype)
    angles = wan_angles(points(GRID), wan_widths(dim))
    out_q, out_k = kernel.rope3d(q, k, GRID, pairs="half" if half else "interleaved")
    assert out_q.is_contiguous() and out_k.is_contiguous()
    assert_as_good(out_q, q, angles, half)
    assert_as_good(out_k, k, angles, half)
    alone, none = kernel.rope3d(q, None, GRID, pairs="half" if half else "interleaved")
    assert none is None and torch.equal(alone, out_q)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [4, 6, 16, 64, 130, 1000, 1544, 2048, 4102, 8208])
def test_in_turn(dim, dtype):
    """As in LTX: over the whole width, with positions between -1 and 1."""
    scale = tuple(2 / size for size in GRID)
    q, k = (random(2, TOKENS, dim, dtype=dtype) for _ in range(2))
    angles = ltx_angles([p * s - 1 for p, s in zip(points(GRID), scale)], dim)
    arguments = {"order": "in_turn", "layout": "bsc", "scale": scale, "offset": -1}
    for out, x in zip(kernel.rope3d(q, k, GRID, **arguments), (q, k)):
        assert_as_good(out.unsqueeze(2), x.unsqueeze(2), angles)
        assert torch.equal(out[..., : dim % 6], x[..., : dim % 6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("widths", [(16, 24, 24), (8, 12, 12), (0, 2, 6), (64, 0, 0), (2, 2, 2), (10, 30, 8)])
def test_widths(widths, half, dtype):
    """With widths and a theta for each axis; elements beyond the widths are copied, also if not finite."""
    theta = (256.0, 10.0, 1e6)
    q = random(1, TOKENS, 2, 64, dtype=dtype)
    q[0, :, :, sum(widths) :][3] = float("inf")
    out, _ = kernel.rope3d(q, None, GRID, widths=widths, theta=theta, pairs="half" if half else "interleaved")
    turning = sum(widths)
    assert torch.equal(out[..., turning:], q[..., turning:])
    assert_as_good(out[..., :turning], q[..., :turning], wan_angles(points(GRID), widths, theta), half)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 300), (40, 1, 1), (7, 16, 3), (2, 31, 1)])
@pytest.mark.parametrize("heads", [1, 2, 5, 24])
def test_grids_and_heads(grid, heads):
    tokens = math.prod(grid)
    q, k = random(3, tokens, heads, 16, dtype=torch.bfloat16), random(3, tokens, 2, 16, dtype=torch.bfloat16)
    angles = wan_angles(points(grid), wan_widths(16))
    for out, x in zip(kernel.rope3d(q, k, grid), (q, k)):
        assert_as_good(out, x, angles)


@pytest.mark.parametrize("seed", range(5))
def test_error_over_many_tokens(seed):
    """The mean error for the shapes of models, in which no tolerance hides a wrong angle."""
    torch.manual_seed(seed)
    grid = (3, 10, 12)
    for dtype in DTYPES:
        q, k = (random(1, 360, 12, 128, dtype=dtype) for _ in range(2))
        angles = wan_angles(points(grid), wan_widths(128))
        for out, x in zip(kernel.rope3d(q, k, grid), (q, k)):
            exact = rotated(x, angles)
            ours = (out.double() - exact).norm()
            assert ours <= 1.1 * (rotated(x, angles, dtype=torch.float32).double() - exact).norm()


def test_large_positions():
    """An angle in float32 would be wrong by a sixteenth at such positions."""
    offset = (2.0**20 - 3, 2.0**20, 2.0**19 + 1)
    q = random(1, TOKENS, 1, 128, dtype=torch.float32)
    positions = [p + o for p, o in zip(points(GRID), offset)]
    out, _ = kernel.rope3d(q, None, GRID, offset=offset)
    assert_as_good(out, q, wan_angles(positions, wan_widths(128)))


def test_tables_are_kept_apart():
    """Calls that differ in one argument do not get each other's tables."""
    q = random(1, TOKENS, 1, 64, dtype=torch.float32)
    calls = [
        {},
        {"theta": 100.0},
        {"theta": (100.0, 10.0, 100.0)},
        {"scale": 0.5},
        {"offset": 0.5},
        {"widths": [20, 22, 22]},
        {"order": "in_turn"},
        {"positions": [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 5]]},
    ]
    first = [kernel.rope3d(q, None, GRID, **arguments)[0] for arguments in calls]
    for i, out in enumerate(first):
        assert all(not torch.equal(out, other) for other in first[:i])
        assert torch.equal(out, kernel.rope3d(q, None, GRID, **calls[i])[0])
    with torch.inference_mode():
        kernel.rope3d(q, None, GRID, theta=77.0)
    q.requires_grad_()
    # Autograd can save the table, which is no inference tensor.
    kernel.rope3d(q, None, GRID, theta=77.0)[0].sum().backward()


def test_result_does_not_depend_on_keeping(monkeypatch):
    q = random(1, 9, 2, 64, dtype=torch.float32)
    kept, _ = kernel.rope3d(q, None, (1, 1, 7), prefix=2)
    monkeypatch.setattr(kernel.rotary, "_kept", kernel.tables.Kept(most_bytes=0))
    assert torch.equal(kernel.rope3d(q, None, (1, 1, 7), prefix=2)[0], kept)
    assert not kernel.rotary._kept.found


def test_tables_kept_are_bounded():
    kept = kernel.tables.Kept(most_bytes=100)
    for size in (10, 5, 12, 8, 3, 2, 1):
        kept.keep(size, torch.zeros(size, device=DEVICE))
    assert list(kept.found) == [10, 5, 8, 2]


def test_threads_share_tables():
    q = random(1, TOKENS, 2, 64, dtype=torch.float32)
    wanted = [rotated(q, wan_angles(points(GRID), wan_widths(64), (100.0 + i,) * 3)) for i in range(8)]

    def rotate(i):
        out, _ = kernel.rope3d(q, None, GRID, theta=100.0 + i % 8)
        return torch.allclose(out.double(), wanted[i % 8], atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rotate, range(64)))


# --- given positions and tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [False, True])
def test_positions_of_axes(tensors):
    q = random(2, TOKENS, 2, 64, dtype=torch.float32)
    axes = [torch.rand(size, dtype=torch.float64) * 9 for size in GRID]
    angles = wan_angles(torch.cartesian_prod(*axes).t(), wan_widths(64))
    given = [axis.to(DEVICE) for axis in axes] if tensors else [axis.tolist() for axis in axes]
    assert_as_good(kernel.rope3d(q, None, GRID, positions=given)[0], q, angles)


@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("order", ["contiguous", "in_turn"])
def test_positions_of_tokens(order, batch):
    q = random(2, 50, 2, 70, dtype=torch.float32)
    positions = [torch.rand(*batch, 50, dtype=torch.float64) * 2 - 1 for _ in range(3)]
    angles = wan_angles(positions, wan_widths(70)) if order == "contiguous" else ltx_angles(positions, 70)
    out, _ = kernel.rope3d(q, None, positions=[p.to(DEVICE) for p in positions], order=order)
    assert_as_good(out, q, angles)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30,), (1, 30), (2, 30)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 40, 12])
def test_tables(rotary_dim, doubled, half, shape, table_dtype):
    q, k = random(2, 30, 4, 64, dtype=torch.bfloat16), random(2, 30, 2, 64, dtype=torch.bfloat16)
    pairs = (rotary_dim or 64) // 2
    angles = torch.rand(*shape, pairs, dtype=torch.float64) * 7
    cos, sin = (t.to(DEVICE, table_dtype) for t in (angles.cos(), angles.sin()))
    given = (
        [torch.cat([t, t], -1) if half else t.repeat_interleave(2, -1) for t in (cos, sin)] if doubled else [cos, sin]
    )
    arguments = {"pairs": "half" if half else "interleaved", "rotary_dim": rotary_dim}
    for out, x in zip(kernel.apply_rotary(q, k, *given, **arguments), (q, k)):
        assert_as_good(out, x, (cos, sin), half)


@pytest.mark.parametrize("shape", [(405,), (6, 405)])
def test_tables_of_many_sequences(shape):
    """More sequences than share a table row, and more tokens than a block takes; shared and separate tables."""
    q, k = random(6, 405, 8, 64, dtype=torch.bfloat16), random(6, 405, 2, 64, dtype=torch.bfloat16)
    angles = torch.rand(*shape, 32, dtype=torch.float64) * 7
    cos, sin = (t.to(DEVICE, torch.float32) for t in (angles.cos(), angles.sin()))
    for out, x in zip(kernel.apply_rotary(q, k, cos, sin), (q, k)):
        assert_as_good(out, x, (cos, sin), False)


def test_tables_apart():
    """cos and sin with different strides, as views of larger tensors."""
    q = random(1, 30, 2, 64, dtype=torch.float32)
    cos, sin = random(32, 30, dtype=torch.float32).t(), random(30, 64, dtype=torch.float32)[:, 1::2]
    out, _ = kernel.apply_rotary(q, None, cos, sin)
    assert_as_good(out, q, (cos, sin))


# --- models ----------------------------------------------------------------------------------------------------------


def wan(x, cos, sin):
    """Rotate `x` [B, S, H, D] by float32 tables that hold every value twice."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., ::2].unsqueeze(-2), sin[..., 1::2].unsqueeze(-2)
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out


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


def assert_agrees(actual, expected):
    """Assert equality to one unit in the last place; near zero, to one unit of the products that are subtracted."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=torch.finfo(torch.float32).eps * 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wan(dtype):
    q, k = (random(2, TOKENS, 3, 128, dtype=dtype) for _ in range(2))
    cos, sin = twice(wan_angles(points(GRID), (44, 42, 42)))
    for own in (kernel.rope3d(q, k, GRID), kernel.apply_rotary(q, k, cos, sin)):
        for out, x in zip(own, (q, k)):
            assert_agrees(out, wan(x, cos, sin))


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


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("prefix", [0, 7])
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts(inplace, prefix, half, dim, dtype):
    """Every layout and stride, in place or not, gives the result of the contiguous layout."""
    tokens = TOKENS + prefix
    pairs = "half" if half else "interleaved"
    q, k = random(2, tokens, 5, dim, dtype=dtype), random(2, tokens, 2, dim, dtype=dtype)
    angles = torch.cat([torch.zeros(prefix, dim // 2), wan_angles(points(GRID), wan_widths(dim))])
    want_q, want_k = kernel.rope3d(q, k, GRID, prefix=prefix, pairs=pairs)
    assert_as_good(want_q, q, angles, half)
    assert torch.equal(want_q[:, :prefix], q[:, :prefix]) and torch.equal(want_k[:, :prefix], k[:, :prefix])

    def strided(x, lead):
        """Return the same values as a view: `lead` elements into longer rows."""
        storage = x.new_zeros(*x.shape[:-1], x.shape[-1] + 16)
        view = storage[..., lead : lead + x.shape[-1]]
        return view.copy_(x)

    joined = torch.cat([q, k, k], 2)
    cases = {
        "heads first": ("bhsd", q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()),
        "heads first, transposed": ("bhsd", q.clone().transpose(1, 2), k.clone().transpose(1, 2)),
        "heads last, transposed": ("bshd", *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))),
        "heads in one dimension": ("bsc", q.flatten(2).clone(), k.flatten(2).clone()),
        "slices of one projection": ("bshd", *joined.clone().split([5, 2, 2], 2)[:2]),
        "slices in one dimension": ("bsc", *joined.flatten(2).split([5 * dim, 2 * dim, 2 * dim], 2)[:2]),
        "longer rows": ("bshd", strided(q, 8), strided(k, 8)),
        "odd offset": ("bshd", strided(q, 1), strided(k, 3)),
    }
    for name, (layout, a, b) in cases.items():
        before = a.clone()
        head_dim = dim if layout == "bsc" else None
        form = {"layout": layout, "head_dim": head_dim, "prefix": prefix, "pairs": pairs}
        out_q, out_k = kernel.rope3d(a, b, GRID, inplace=inplace, **form)
        for out, x, want in ((out_q, a, want_q), (out_k, b, want_k)):
            if inplace:
                assert out is x, name
            else:
                assert out.is_contiguous() and out.shape == x.shape, name
            wanted = want.transpose(1, 2) if layout == "bhsd" else want.flatten(2) if layout == "bsc" else want
            # A compiler contracts the arithmetic of vectors and of single elements differently.
            torch.testing.assert_close(out, wanted, msg=name)
        assert inplace or torch.equal(a, before), name


@pytest.mark.parametrize("half", [False, True])
def test_many_tokens(half):
    """Heads first: so many that a launch divides them differently, and heads that do not fit one block."""
    for grid, heads, dim in (((3, 30, 31), 7, 64), (GRID, 75, 128)):
        q, k = (random(1, math.prod(grid), h, dim, dtype=torch.bfloat16) for h in (heads, 3))
        wanted = [rotated(x, wan_angles(points(grid), wan_widths(dim)), half) for x in (q, k)]
        for layout in ("bshd", "bhsd"):
            order = (0, 2, 1, 3) if layout == "bhsd" else (0, 1, 2, 3)
            given = [x.permute(order).contiguous() for x in (q, k)]
            outs = kernel.rope3d(*given, grid, layout=layout, pairs="half" if half else "interleaved")
            for out, want in zip(outs, wanted):
                assert_agrees(out.permute(order), want.bfloat16())


def test_what_lies_between_is_not_written():
    storage = random(2, TOKENS, 3, 80, dtype=torch.bfloat16)
    before = storage.clone()
    kernel.rope3d(storage[..., 8:72], None, GRID, inplace=True)
    assert torch.equal(storage[..., :8], before[..., :8]) and torch.equal(storage[..., 72:], before[..., 72:])
    assert not torch.equal(storage[..., 8:72], before[..., 8:72])


def test_elements_apart():
    q = random(1, TOKENS, 64, 4, dtype=torch.float32).transpose(2, 3)
    assert torch.equal(kernel.rope3d(q, None, GRID)[0], kernel.rope3d(q.contiguous(), None, GRID)[0])
    with pytest.raises(RuntimeError, match="q must have adjacent elements"):
        kernel.rope3d(q, None, GRID, inplace=True)
    with pytest.raises(RuntimeError, match="k must have adjacent elements"):
        kernel.rope3d(q.contiguous(), q, GRID, inplace=True)


@pytest.mark.parametrize("shape", [(0, TOKENS, 2, 64), (2, TOKENS, 0, 64), (2, TOKENS, 2, 0), (2, 0, 2, 64)])
@pytest.mark.parametrize("inplace", [False, True])
def test_empty(inplace, shape):
    grid = GRID if shape[1] else (0, 4, 5)
    q = random(*shape, dtype=torch.float16).requires_grad_(not inplace)
    k = random(2, TOKENS, 2, 64, dtype=torch.float16) if shape[2] == 0 else q
    out_q, out_k = kernel.rope3d(q, k.detach(), grid, inplace=inplace)
    assert out_q.shape == shape and out_k.shape == k.shape
    if not inplace:
        out_q.sum().backward()
        assert q.grad.shape == shape


def test_only_prefix():
    q = random(2, 5, 2, 64, dtype=torch.float16)
    assert torch.equal(kernel.rope3d(q, None, (0, 4, 5), prefix=5)[0], q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(value, dtype):
    """A value that is not finite changes only its pair."""
    q = random(1, TOKENS, 2, 64, dtype=dtype)
    want, _ = kernel.rope3d(q, None, GRID)
    q[0, 7, 1, 10] = value
    out, _ = kernel.rope3d(q, None, GRID)
    assert not out[0, 7, 1, 10:12].isfinite().any()
    out[0, 7, 1, 10:12] = want[0, 7, 1, 10:12]
    assert torch.equal(out, want)


def test_subnormal():
    q = torch.full((1, TOKENS, 1, 64), 2.0**-24 * 100, dtype=torch.float16, device=DEVICE)
    assert_as_good(kernel.rope3d(q, None, GRID)[0], q, wan_angles(points(GRID), wan_widths(64)))
    tiny = torch.full((1, 1, 1, 64), 1e-40, device=DEVICE)
    assert torch.equal(kernel.rope3d(tiny, None, (1, 1, 1))[0], tiny)


# --- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize("inplace", [False, True])
def test_backward(inplace, dim, half, dtype):
    leaves = [random(2, TOKENS, heads, dim, dtype=dtype, requires_grad=True) for heads in (3, 1)]
    grads = [random(2, TOKENS, heads, dim, dtype=dtype) for heads in (3, 1)]
    q, k = (leaf.clone() for leaf in leaves) if inplace else leaves
    outs = kernel.rope3d(q, k, GRID, pairs="half" if half else "interleaved", inplace=inplace)
    angles = wan_angles(points(GRID), wan_widths(dim))
    for actual, grad in zip(torch.autograd.grad(outs, leaves, grads), grads):
        assert_as_good(actual, grad, -angles, half)


@pytest.mark.parametrize("half", [False, True])
def test_backward_of_the_reference(half):
    """The reference above is a rotation by the negative angles; this compares it with autograd."""
    x, grad = (torch.randn(2, TOKENS, 2, 10, dtype=torch.float64) for _ in range(2))
    angles = wan_angles(points(GRID), wan_widths(10))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotated(x, angles, half)[:, ::7], x)
    (actual,) = torch.autograd.grad(rotated(x, angles, half), x, grad)
    torch.testing.assert_close(actual, rotated(grad, -angles, half))


def test_backward_in_turn():
    q = random(2, TOKENS, 130, dtype=torch.float32, requires_grad=True)
    out, _ = kernel.rope3d(q, None, GRID, order="in_turn", layout="bsc")
    grad = random(2, TOKENS, 130, dtype=torch.float32)
    (actual,) = torch.autograd.grad(out, q, grad)
    assert_as_good(actual.unsqueeze(2), grad.unsqueeze(2), -ltx_angles(points(GRID), 130))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_only_what_needs_a_gradient_gets_one(needed, used):
    leaves = [random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=n) for n in needed]
    out = kernel.rope3d(*leaves, GRID)[used]
    grad = random(1, TOKENS, 2, 16, dtype=torch.float32)
    out.backward(grad)
    for i, leaf in enumerate(leaves):
        if needed[i] and i == used:
            assert_as_good(leaf.grad, grad, -wan_angles(points(GRID), wan_widths(16)))
        else:
            assert leaf.grad is None
    with torch.no_grad():
        assert not kernel.rope3d(*leaves, GRID)[0].requires_grad


def test_second_derivative():
    """The rotation is linear: the gradient of its gradient is the rotation again."""
    q = random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True)
    grad = random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True)
    (first,) = torch.autograd.grad(kernel.rope3d(q, None, GRID)[0], q, grad, create_graph=True)
    (second,) = torch.autograd.grad(first, grad, q.detach())
    torch.testing.assert_close(second, kernel.rope3d(q, None, GRID)[0])


def test_in_place_is_noticed():
    """Autograd refuses a gradient that needs a value which the rotation has overwritten."""
    x = random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True)
    y = x * 2
    loss = y.square()
    with torch.no_grad():
        kernel.rope3d(y, None, GRID, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    with pytest.raises(RuntimeError, match="leaf"):
        kernel.rope3d(x, None, GRID, inplace=True)


# --- errors ----------------------------------------------------------------------------------------------------------


# The arguments of the ops after q and k.
FORM = {"prefix": 0, "head_dim": 0, "half": False, "heads_first": False, "inverse": False}
PAIRS = {"frame_pairs": 2, "height_pairs": 1, "width_pairs": 1, "in_turn": False}


def of_grid(**changes):
    table = torch.zeros(6, 8, 2)
    return {"table": table, "frames": 1, "height": 2, "width": 3, **PAIRS, **FORM, **changes}


def of_tokens(**changes):
    return {"cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4), "rotary_dim": 0, **FORM, **changes}


def assert_refused(name, message, arguments, fake):
    device = "meta" if fake else DEVICE
    given = {"q": torch.zeros(2, 6, 4, 8), "k": torch.zeros(2, 6, 2, 8), **arguments}
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()})


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", ["rotate_grid", "rotate_grid_", "rotate_tokens", "rotate_tokens_"])
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q must be float32, float16 or bfloat16", {"q": torch.zeros(2, 6, 4, 8, dtype=torch.float64)}),
        ("q must have 4 dimensions, not 2", {"q": torch.zeros(6, 8)}),
        ("q must have 4 dimensions, not 3", {"q": torch.zeros(2, 6, 8), "heads_first": True}),
        ("q must have 3 dimensions, not 4", {"head_dim": -1}),
        ("prefix must not be negative", {"prefix": -1}),
        ("q must have an even number of elements in each head", {"q": torch.zeros(2, 6, 4, 7)}),
        ("q must have a multiple of 3 elements", {"q": torch.zeros(2, 6, 8), "head_dim": 3}),
        ("k must have the dtype of q", {"k": torch.zeros(2, 6, 2, 8, dtype=torch.float16)}),
        ("k must have as many sequences", {"k": torch.zeros(1, 6, 2, 8)}),
        ("k must have as many sequences, tokens", {"k": torch.zeros(2, 5, 2, 8)}),
        ("k must have as many sequences, tokens and elements", {"k": torch.zeros(2, 6, 2, 10)}),
    ],
)
def test_operator_errors(message, changes, name, fake):
    assert_refused(name, message, (of_tokens if "tokens" in name else of_grid)(**changes), fake)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", ["rotate_grid", "rotate_grid_"])
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q must have heads of at least 10 elements, not 8", {"width_pairs": 2}),
        (r"grid and prefix must have 6 tokens, as q has, not 2 \* 2 \* 3 \+ 0", {"frames": 2}),
        (r"grid and prefix must have 6 tokens, as q has, not 1 \* 2 \* 3 \+ 1", {"prefix": 1}),
        ("grid must have no negative size", {"frames": -1, "height": -6, "width": 13}),
        ("grid must have no negative size, nor a negative number of pairs", {"frame_pairs": -1}),
        ("table must be float32", {"table": torch.zeros(6, 8, 2, dtype=torch.float16)}),
        (r"table must have shape \[rows, entries, 2\], not \[6, 16\]", {"table": torch.zeros(6, 16)}),
        (r"table must have shape \[6, 8, 2\], not \[6, 4, 2\]", {"table": torch.zeros(6, 4, 2)}),
        (r"table must have shape \[6, 8, 2\], not \[7, 8, 2\]", {"table": torch.zeros(7, 8, 2)}),
        ("table must be contiguous", {"table": torch.zeros(8, 6, 2).transpose(0, 1)}),
    ],
)
def test_grid_operator_errors(message, changes, name, fake):
    assert_refused(name, message, of_grid(**changes), fake)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", ["rotate_tokens", "rotate_tokens_"])
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("cos must be float32, float16 or bfloat16", {"cos": torch.zeros(6, 4).double()}),
        ("sin must have the dtype of cos", {"sin": torch.zeros(6, 4).half()}),
        (r"sin must have shape \[6, 4\], not \[4, 6\]", {"sin": torch.zeros(4, 6)}),
        ("cos must have two or three dimensions", {"cos": torch.zeros(6), "sin": torch.zeros(6)}),
        (
            "cos must be for one sequence or for 2, not 3",
            {"cos": torch.zeros(3, 6, 4), "sin": torch.zeros(3, 6, 4)},
        ),
        (
            "cos must have 8 or 4 in its last dimension, not 6",
            {"cos": torch.zeros(6, 6), "sin": torch.zeros(6, 6)},
        ),
        ("cos must have 6 or 3 in its last dimension, not 4", {"rotary_dim": 6}),
        ("rotary_dim must be even and at most 8, not 10", {"rotary_dim": 10}),
        ("rotary_dim must be even and at most 8, not 5", {"rotary_dim": 5}),
        (
            r"cos and prefix must have 6 tokens, as q has, not 7 \+ 0",
            {"cos": torch.zeros(7, 4), "sin": torch.zeros(7, 4)},
        ),
        (r"cos and prefix must have 6 tokens, as q has, not 6 \+ 2", {"prefix": 2}),
    ],
)
def test_token_operator_errors(message, changes, name, fake):
    assert_refused(name, message, of_tokens(**changes), fake)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("order must be", {"order": "sideways"}),
        ("widths must be None with the order", {"widths": (2, 2, 2), "order": "in_turn"}),
        ("pairs must be", {"pairs": "quarter"}),
        ("layout must be", {"layout": "sbhd"}),
        ("head_dim must be positive, and goes with", {"head_dim": 8}),
        ("theta must be one number or 3, not 2", {"theta": (1.0, 2.0)}),
        ("scale must be one number or 3, not 4", {"scale": (1.0,) * 4}),
        (r"widths must be 3 even numbers of at most 8 in sum, not \[2, 2, 6\]", {"widths": (2, 2, 6)}),
        (r"widths must be 3 even numbers of at most 8 in sum, not \[1, 1, 2\]", {"widths": (1, 1, 2)}),
        ("grid must have 3 sizes, not 2", {"grid": (2, 3)}),
        ("positions must be given for 3 axes, not 2", {"positions": [[0], [0, 1]]}),
        ("positions must be as many as grid has on each axis", {"positions": [[0], [0], [0, 1, 2]]}),
        ("grid or positions must be given", {"grid": None}),
    ],
)
def test_errors_name_the_argument(message, arguments):
    q = torch.zeros(2, 6, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        kernel.rope3d(q, q, **{"grid": (1, 2, 3), **arguments})


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it uses two devices")
def test_errors_name_the_argument_on_another_device():
    q, table = torch.zeros(2, 6, 4, 8, device="cuda"), torch.zeros(6, 4, device="cuda")
    with pytest.raises(RuntimeError, match="k must be on the device of q"):
        kernel.apply_rotary(q, q.cpu(), table, table)
    with pytest.raises(RuntimeError, match="q must be on a CUDA device"):
        kernel.apply_rotary(q.cpu(), q, table, table)
    with pytest.raises(RuntimeError, match="cos must be on the device of q"):
        kernel.apply_rotary(q, q, table.cpu(), table)
    with pytest.raises(RuntimeError, match="sin must be on the device of cos"):
        kernel.apply_rotary(q, q, table, table.cpu())


# --- torch.library, torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    inverse = dtype == torch.float16
    q, k = random(2, TOKENS + 1, 3, 16, dtype=dtype), random(2, TOKENS + 1, 16, 1, dtype=dtype).transpose(2, 3)
    form = (1, 0, False, False, inverse)
    cos, sin = torch.rand(2, 2, TOKENS, 8, device=DEVICE)
    cases = {
        "rotate_grid": (torch.rand(12, 8, 2, device=DEVICE), *GRID, 4, 2, 2, *form[:2], False, *form[2:]),
        "rotate_tokens": (cos, sin, 0, *form),
    }
    for name, rest in cases.items():
        for grad in (False, True):
            for other in (None, k.detach().requires_grad_(grad)):
                torch.library.opcheck(getattr(ops, name).default, (q.detach().requires_grad_(grad), other, *rest))
        for other in (None, k.contiguous()):
            torch.library.opcheck(getattr(ops, name + "_").default, (q.clone(), other, *rest))


def test_fake_tensors():
    """A fake tensor must not meet a kept table, nor a later call a fake table."""
    q = random(1, TOKENS, 2, 64, dtype=torch.float32)
    kernel.rope3d(q, None, GRID)
    with FakeTensorMode() as mode:
        out, _ = kernel.rope3d(mode.from_tensor(q), None, GRID)
    assert out.shape == q.shape and out.device == q.device
    with FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = kernel.rope3d(q, None, GRID, theta=55.0)
    assert type(out) is not torch.Tensor
    assert type(kernel.rope3d(q, None, GRID, theta=55.0)[0]) is torch.Tensor


@pytest.mark.parametrize("rotate", ["rope3d", "apply_rotary"])
def test_in_place_saves_and_versions(rotate):
    """In place and out of place have one gradient, and every way of writing q and k bumps their versions."""
    cos, sin = torch.rand(2, TOKENS, 8, device=DEVICE)
    arguments = (GRID,) if rotate == "rope3d" else (cos, sin)
    q, k = (random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True) for _ in range(2))
    grads = [torch.randn_like(q) for _ in range(2)]
    expected = torch.autograd.grad(getattr(kernel, rotate)(q, k, *arguments), (q, k), grads)

    def block(q, k):
        q, k = q * 1, k * 1
        return getattr(kernel, rotate)(q, k, *arguments, inplace=True)

    torch._dynamo.reset()
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(function(q, k), (q, k), grads), expected)
    changed = q * 1
    version = changed._version
    getattr(kernel, rotate)(changed, None, *arguments, inplace=True)
    assert changed._version > version
    with torch.no_grad():
        version = changed._version
        getattr(kernel, rotate)(changed, None, *arguments, inplace=True)
        assert changed._version > version


@pytest.mark.kernels_ci
def test_compile():
    def block(q, k, grid):
        q, k = kernel.rope3d(q * 2, k, grid, prefix=2)
        return kernel.apply_rotary(q, k, cos, sin, pairs="half")

    cos, sin = torch.rand(2, 2 + 4 * 60, 16, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            q, k = (random(batch, 242, heads, 32, dtype=torch.float32, requires_grad=True) for heads in (3, 2))
            expected, actual = block(q, k, (12, 4, 5)), compiled(q, k, (12, 4, 5))
            torch.testing.assert_close(actual, expected)
            grads = [torch.randn_like(e) for e in expected]
            torch.testing.assert_close(
                torch.autograd.grad(actual, (q, k), grads), torch.autograd.grad(expected, (q, k), grads)
            )


def test_compile_another_grid():
    def on(grid, q):
        return kernel.rope3d(q, None, grid)

    torch._dynamo.reset()
    compiled = torch.compile(on, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((3, 4, 5), (6, 7, 8)):
        with torch.compiler.set_stance("fail_on_recompile" if grid[0] == 6 else "default"):
            q = random(2, math.prod(grid), 3, 32, dtype=torch.float32)
            torch.testing.assert_close(compiled(grid, q)[0], kernel.rope3d(q, None, grid)[0])


def test_compile_in_place():
    def block(q):
        q = q + 1
        kernel.rope3d(q, None, GRID, inplace=True)
        return q * 2

    torch._dynamo.reset()
    q = random(2, TOKENS, 3, 32, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(q), block(q))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: kernel.rope3d(q + 1, q, GRID), fullgraph=True, dynamic=True)
    for batch in (4, 9):
        q = random(batch, TOKENS, 3, 128, dtype=torch.bfloat16)
        for actual, expected in zip(compiled(q), kernel.rope3d(q + 1, q, GRID)):
            torch.testing.assert_close(actual, expected)


# --- GPU only --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@gpu
def test_stream():
    q = random(1, 7 * 64 * 64, 16, 128, dtype=torch.bfloat16)
    expected, _ = kernel.rope3d(q, None, (7, 64, 64))
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        out, _ = kernel.rope3d(late, None, (7, 64, 64))
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    """The current device is not that of the tensors, and does not change."""
    q, k = (random(1, TOKENS, 3, 64, dtype=torch.float16).to("cuda:1") for _ in range(2))
    angles = wan_angles(points(GRID), wan_widths(64))
    cos, sin = (f(angles).float().to("cuda:1") for f in (torch.cos, torch.sin))
    for own in (kernel.rope3d(q, k, GRID), kernel.apply_rotary(q, k, cos, sin)):
        for out, x in zip(own, (q, k)):
            assert out.device == x.device
            assert_as_good(out, x, angles)
    assert torch.cuda.current_device() == 0


@gpu
@pytest.mark.parametrize("theta", [10000.0, 123.0])
def test_graph(theta):
    """Also with tables made during the capture, which other calls must not get."""
    q, k = (random(1, TOKENS, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))

    def step(theta):
        out = kernel.rope3d(q, k, GRID, theta=theta)
        return torch.autograd.grad(out, (q, k), (k.detach(), q.detach()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(10000.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(theta)
    expected = step(theta)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected))
    with torch.no_grad():
        q.copy_(random(1, TOKENS, 3, 64, dtype=torch.float16))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(theta)))


@gpu
def test_more_elements_than_32_bits_count():
    heads, dim, grid = 64, 128, (64, 64, 65)
    tokens = math.prod(grid)
    if torch.cuda.mem_get_info()[0] < 2 * 2 * heads * dim * tokens + 2**30:
        pytest.skip("needs 9 GB of GPU memory")
    q = torch.ones(1, tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    q[0, -1] = random(heads, dim, dtype=torch.bfloat16)
    last = wan_angles([torch.tensor([size - 1.0], dtype=torch.float64) for size in grid], wan_widths(dim))
    cos, sin = (f(last).float().to(DEVICE).expand(tokens, -1) for f in (torch.cos, torch.sin))
    for pairs in ("interleaved", "half"):
        for rotate in (
            lambda pairs=pairs: kernel.rope3d(q, None, grid, pairs=pairs),
            lambda pairs=pairs: kernel.apply_rotary(q, None, cos, sin, pairs=pairs),
            lambda pairs=pairs: kernel.apply_rotary(q[:, :, :62], q[:, :, 62:], cos, sin, pairs=pairs)[::-1],
        ):
            out, _ = rotate()
            heads = out.shape[2]
            assert_as_good(out[:, -1:], q[:, -1:, -heads:], last, pairs == "half")
            del out
