"""References, tensors and assertions that the tests of rope3d share."""

import math
from pathlib import Path

import torch
from testing import Op, load, random

PROJECT = Path(__file__).resolve().parents[1]
GRID = (3, 4, 5)
TOKENS = math.prod(GRID)
# Less than a vector, odd multiples of a pair, not a multiple of a vector, axes that end within a vector, and more than
# the CPU gathers at a time.
DIMS = [2, 6, 10, 16, 44, 64, 128, 130, 1000, 1544]


kernel = load(PROJECT)
ops = kernel.rotary.ops


def points(grid):
    """Return the index of every token on each axis: [3, tokens]."""
    return torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid)).view(-1, 3).t()


def wan_angles(positions, widths, theta=(10000.0,) * 3):
    """Return the angles [..., tokens, pairs] of axes whose pairs are adjacent."""
    exponents = [torch.arange(0, w, 2, dtype=torch.float64) / max(w, 1) for w in widths]
    return torch.cat([p[..., None] / t**e for p, e, t in zip(positions, exponents, theta)], -1)


def ltx_angles(positions, dim, theta=10000.0):
    """Return the angles [..., tokens, pairs] of interleaved axes, with zeros in front for the elements left over."""
    steps = torch.linspace(0, 1, dim // 6, dtype=torch.float64)
    ladder = theta**steps * (math.pi / 2)
    angles = torch.stack([p[..., None] * ladder for p in positions], -1).flatten(-2)
    return torch.cat([angles.new_zeros(*angles.shape[:-1], dim % 6 // 2), angles], -1)


def wan_widths(dim):
    return dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6)


def of_elements(*shape, dtype=torch.float32):
    """Return cosines and sines with other values for the second elements of pairs than for the first ones."""
    cos, sin = (tuple(random(*shape, dtype=dtype) / 2 for _ in range(2)) for _ in range(2))
    return cos, sin


def joined(entries, half):
    """Return a row, or a table, from the parts of the first and of the second elements of pairs."""
    return torch.cat(entries, -1) if half else torch.stack(entries, -1).flatten(-2)


def rotated(x, angles, half=False, dtype=torch.float64):
    """Rotate x [B, S, H, D] in `dtype`; round to the dtype of x unless it is float64.

    `angles` may be (cos, sin), each [..., pairs], or two of them, for the first and the second elements of pairs.
    """
    cos, sin = angles if isinstance(angles, tuple) else (angles.cos(), angles.sin())
    (cos_a, cos_b), (sin_a, sin_b) = (
        [part.to(x.device, dtype).unsqueeze(-2) for part in (t if isinstance(t, tuple) else (t, t))] for t in (cos, sin)
    )
    rotary, passthrough = x.to(dtype).split([2 * cos_a.shape[-1], x.shape[-1] - 2 * cos_a.shape[-1]], -1)
    a, b = rotary.chunk(2, -1) if half else (rotary[..., ::2], rotary[..., 1::2])
    turned = joined((a * cos_a - b * sin_a, a * sin_b + b * cos_b), half)
    result = torch.cat([turned, passthrough], -1)
    return result if dtype == torch.float64 else result.to(x.dtype)


def layouts_of(q, k):
    """Return copies of q and k, `[batch, tokens, heads, dim]`, in all layouts, by name: the layout's name, q and k."""
    heads, more, dim = q.shape[2], k.shape[2], q.shape[3]
    joined = torch.cat([q, k, k], 2)
    widths = [heads * dim, more * dim, more * dim]

    def strided(x, lead):
        """Return the same values as a view: `lead` elements into longer rows."""
        storage = x.new_zeros(*x.shape[:-1], x.shape[-1] + 16)
        view = storage[..., lead : lead + x.shape[-1]]
        return view.copy_(x)

    return {
        "heads first": ("bhsd", q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()),
        "heads first, transposed": ("bhsd", q.clone().transpose(1, 2), k.clone().transpose(1, 2)),
        "heads last, transposed": ("bshd", *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))),
        "heads in one dimension": ("bsc", q.flatten(2).clone(), k.flatten(2).clone()),
        "slices of one projection": ("bshd", *joined.clone().split([heads, more, more], 2)[:2]),
        "slices in one dimension": ("bsc", *joined.flatten(2).split(widths, 2)[:2]),
        "longer rows": ("bshd", strided(q, 8), strided(k, 8)),
        "odd offset": ("bshd", strided(q, 1), strided(k, 3)),
    }


def assert_as_good(actual, x, angles, half=False):
    """Assert that the error of `actual` is at most 1.1 times that of float32 arithmetic, rounded once."""
    exact, eager = rotated(x, angles, half), rotated(x, angles, half, torch.float32)
    assert actual.dtype == x.dtype and actual.shape == x.shape
    scale = torch.finfo(x.dtype).eps
    torch.testing.assert_close(actual.double(), exact, rtol=scale, atol=2 * scale)
    if x.numel() >= 1000:
        assert (actual.double() - exact).norm() <= 1.1 * (eager.double() - exact).norm()


def assert_agrees(actual, expected):
    """Assert equality to one unit in the last place; near zero, to one unit of the products that are subtracted."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=torch.finfo(torch.float32).eps * 4)


def beside(tables, *tensors):
    """Return the tables on the device of the first tensor. Some calls have arguments of wrong types."""
    device = next(tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor))
    return [table.to(device) for table in tables]


def rotations(function, exact, tokens, dim):
    """Return an op of q and k."""
    inputs = lambda batch, dtype: [random(batch, tokens, heads, dim, dtype=dtype) for heads in (3, 1)]  # noqa: E731
    return Op(function, lambda q, k: (exact(q), exact(k)), inputs)


OPS = {}
for half in (False, True):
    turns, given = wan_angles(points(GRID), wan_widths(10)), of_elements(5, 6)
    tables, options = [joined(t, half) for t in given], {"pairs": "half" if half else "interleaved"}
    for inplace in (False, True):  # a leaf cannot be changed in place
        OPS[f"rope3d, half={half}, inplace={inplace}"] = rotations(
            lambda q, k, inplace=inplace, options=options: kernel.rope3d(
                q * 1, k * 1, GRID, inplace=inplace, **options
            ),
            lambda x, turns=turns, half=half: rotated(x, turns, half),
            TOKENS,
            10,
        )
    OPS[f"apply_rotary, half={half}"] = rotations(
        lambda q, k, tables=tables, options=options: kernel.apply_rotary(
            q, k, *beside(tables, q, k), prefix=2, rotary_dim=12, **options
        ),
        lambda x, given=given, half=half: torch.cat((x[:, :2], rotated(x[:, 2:], given, half)), 1),
        7,
        16,
    )
OPS["rope3d in turn"] = rotations(
    lambda q, k: kernel.rope3d(q, k, GRID, order="in_turn"),
    lambda x: rotated(x, ltx_angles(points(GRID), 16)),
    TOKENS,
    16,
)
