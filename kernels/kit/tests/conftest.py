"""The settings of the kernels' tests: each kernel links to this file."""

from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).resolve().parents[2]
pytest.register_assert_rewrite("testing", *(path.stem for path in KERNELS.glob("*/tests/reference_*.py")))

# Most tensors are so small that more threads cost more time than they save, 20 times as much on a busy machine.
torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")


@pytest.fixture
def two_threads():
    """Let the CPU kernels divide large tensors between two threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
