"""All ops of the kernel, for test_all_ops.py."""

import reference_norm_rotary
import reference_rope3d
from reference_rope3d import ops  # noqa: F401 - for op_tests.py

OPS = {**reference_rope3d.OPS, **reference_norm_rotary.OPS}
# Torch 2.11 fails an assertion of its own when it compiles a second norm_rotary with gradients in one graph.
GRAPHS = [reference_rope3d.OPS, *({name: op} for name, op in reference_norm_rotary.OPS.items())]
GROUPS = [reference_rope3d.OPS, reference_norm_rotary.OPS]
