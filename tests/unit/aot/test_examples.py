"""The Triton projects of examples/triton are completed by their launch functions, without Triton."""

import pytest

from kernel_aot import read_ops, variants
from kernel_builder.config import aot_toml
from tests.support.places import ROOT


@pytest.mark.parametrize(
    ("project", "op", "schema", "kernels"),
    [
        (
            "attention",
            "attention",
            "(Tensor q, Tensor k, Tensor v, float scale, bool causal=False) -> (Tensor, Tensor)",
            4,
        ),
        (
            "cross_entropy",
            "cross_entropy_forward",
            "(Tensor logits, Tensor target, int ignore_index=-100) -> (Tensor, Tensor)",
            12,
        ),
        ("int8_matmul", "int8_linear", "(Tensor x, Tensor weight, Tensor scale) -> Tensor", 12),
        ("moe_routing", "route", "(Tensor logits, int top_k) -> (Tensor, Tensor, Tensor)", 12),
        ("rms_norm", "rms_norm_forward", "(Tensor x, Tensor weight, float eps=1e-06) -> (Tensor, Tensor)", 18),
        (
            "state_update",
            "state_update",
            "(Tensor(a!) state, Tensor x, Tensor dt, Tensor dt_bias, Tensor a, Tensor b, Tensor c, Tensor d) -> Tensor",
            12,
        ),
    ],
)
def test_ops_are_completed(project, op, schema, kernels):
    root = ROOT / "examples" / "triton" / project
    ops = {found.name: found for found in read_ops(root, aot_toml.read(root))}
    assert ops[op].schema == schema
    assert len(list(variants(ops[op]))) == kernels
