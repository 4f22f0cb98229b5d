"""Fixtures for the tests of blocks: the package as built, and small models of diffusers and transformers."""

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).parents[1]
DEPENDENCIES = ("adaln", "geglu", "rmsnorm", "rope3d")


@pytest.fixture(scope="session")
def blocks():
    """The package as built, with the kernels as built in this checkout."""
    paths = [f"kernels-community/{name}={PROJECT.parent / name}" for name in DEPENDENCIES]
    overridden = os.environ.get("LOCAL_KERNELS")
    os.environ["LOCAL_KERNELS"] = os.pathsep.join([overridden, *paths] if overridden else paths)
    try:
        return get_local_kernel(PROJECT)
    finally:
        if overridden is None:
            del os.environ["LOCAL_KERNELS"]
        else:
            os.environ["LOCAL_KERNELS"] = overridden


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
