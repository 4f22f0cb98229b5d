"""Compares the built kernel with Torch. The public client loads it from `build/`, as it does for users."""

import copy
import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
EMULATED = "KERNEL_BUILDER_EMULATOR" in os.environ
DEVICE = "cpu" if EMULATED else "${backend}"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or kernel-builder emulate", allow_module_level=True)
kernel = get_local_kernel(PROJECT, backend=DEVICE)

# Function -> arguments of a call.
ARGUMENTS = {
${arguments}
}


def expected(name, *arguments):
    pytest.skip(f"Not written yet: the formula of {name}, in PyTorch")


def assert_same(actual, expected):
    if expected is None or isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ARGUMENTS)
def test_result(name):
    arguments = ARGUMENTS[name]
    copies, others = copy.deepcopy(arguments), copy.deepcopy(arguments)
    assert_same(getattr(kernel, name)(*copies), expected(name, *others))
    for actual, written in zip(copies, others):
        assert_same(actual, written)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name):
    utils = ("test_schema", "test_faketensor") if name in kernel.op.FAKES else ("test_schema",)
    torch.library.opcheck(getattr(kernel, name), tuple(copy.deepcopy(ARGUMENTS[name])), test_utils=utils)
