"""The operators, and their fakes for `torch.compile`."""

import torch

from ._ops import add_op_namespace_prefix, ops

$assign

# Not written yet: empty tensors with the shapes and dtypes of the results. These are for results like the first tensor.
FAKES = {
${fakes}
}
for _name, _fake in FAKES.items():
    torch.library.register_fake(add_op_namespace_prefix(_name))(_fake)
