"""Scales a tensor by a Metal shader, which Torch compiles when it is first called."""

import functools

import torch

_SOURCE = """
#include <metal_stdlib>
using namespace metal;

kernel void scale(device float* out, constant float* x, constant float& factor,
                  uint i [[thread_position_in_grid]]) {
  out[i] = factor * x[i];
}
"""


@functools.cache
def _library():
    return torch.mps.compile_shader(_SOURCE)


def scaled(x, factor):
    """Return factor * x, for a float32 tensor on the device `mps`."""
    if x.device.type != "mps" or x.dtype != torch.float32:
        raise ValueError(f"x must be float32 on mps, not {x.dtype} on {x.device}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _library().scale(out, x.contiguous(), factor)
    return out


__all__ = ["scaled"]
