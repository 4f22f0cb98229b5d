"""A step of a selective state space model, as at decoding: the state of each channel is updated in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def softplus(x):
    return tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)


@triton.jit
def step_kernel(
    state_ptr,
    x_ptr,
    dt_ptr,
    dt_bias_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    out_ptr,
    channels,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    n = tl.arange(0, STATE)
    x = tl.load(x_ptr + batch * channels + channel, mask=mask, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + batch * channels + channel, mask=mask, other=0.0).to(tl.float32)
    dt = softplus(dt + tl.load(dt_bias_ptr + channel, mask=mask, other=0.0))
    a = tl.load(a_ptr + channel[:, None] * STATE + n[None, :], mask=mask[:, None], other=0.0)
    b = tl.load(b_ptr + batch * STATE + n).to(tl.float32)
    c = tl.load(c_ptr + batch * STATE + n).to(tl.float32)
    d = tl.load(d_ptr + channel, mask=mask, other=0.0)
    state_ptrs = state_ptr + (batch * channels + channel)[:, None] * STATE + n[None, :]
    state = tl.load(state_ptrs, mask=mask[:, None], other=0.0)
    state = state * tl.exp(a * dt[:, None]) + (dt * x)[:, None] * b[None, :]
    tl.store(state_ptrs, state, mask=mask[:, None])
    out = tl.sum(state * c[None, :], axis=1) + x * d
    tl.store(out_ptr + batch * channels + channel, out, mask=mask)


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """Update `state` (batch by channels by 16 or 128, float32) by a token, and return its outputs.

    `x` and `dt` are batch by channels, `b` and `c` batch by state size. `a` is channels by state size, `dt_bias` and
    `d` have a value for each channel, all three in float32.
    """
    assert state.dim() == 3 and x.dim() == 2 and dt.dim() == 2 and a.dim() == 2 and b.dim() == 2 and c.dim() == 2
    assert state.is_contiguous() and x.is_contiguous() and dt.is_contiguous() and dt_bias.is_contiguous()
    assert a.is_contiguous() and b.is_contiguous() and c.is_contiguous() and d.is_contiguous()
    assert x.shape[0] == state.shape[0] and x.shape[1] == state.shape[1]
    assert dt.shape[0] == x.shape[0] and dt.shape[1] == x.shape[1] and b.shape[0] == x.shape[0]
    assert a.shape[0] == x.shape[1] and a.shape[1] == state.shape[2]
    assert b.shape[1] == state.shape[2] and c.shape[1] == state.shape[2]
    assert dt_bias.shape[0] == x.shape[1] and d.shape[0] == x.shape[1] and c.shape[0] == x.shape[0]
    batch, channels = x.shape
    out = torch.empty_like(x)
    step_kernel[lambda meta: (triton.cdiv(channels, meta["BLOCK"]), batch)](
        state, x, dt, dt_bias, a, b, c, d, out, channels, STATE=state.shape[2], BLOCK=16, num_warps=4
    )
    return out
