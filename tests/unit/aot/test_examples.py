"""The Triton projects of examples/triton are completed by their launch functions, without Triton."""

from pathlib import Path

import pytest

from kernel_aot import read_ops, variants
from kernel_builder import toml_file
from kernel_builder.config import aot_toml
from tests.support.places import ROOT

EXAMPLES = toml_file.read(Path(__file__).with_name("examples.toml"))


@pytest.mark.parametrize("project", EXAMPLES)
def test_ops_are_completed(project):
    root = ROOT / "examples" / "triton" / project
    ops = {found.name: found for found in read_ops(root, aot_toml.read(root))}
    expected = EXAMPLES[project]
    op = ops[expected["op"]]
    assert op.schema == expected["schema"]
    assert len(list(variants(op))) == expected["kernels"]
