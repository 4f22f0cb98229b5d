import pytest
import torch

pytest.register_assert_rewrite("reference_decode")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")


# Most tensors are so small that more threads cost more time than they save.
torch.set_num_threads(1)


@pytest.fixture
def two_threads():
    """Let the CPU kernels divide columns and heads between two threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
