import pytest
import torch

pytest.register_assert_rewrite("reference_rope3d", "reference_norm_rotary")


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
