"""Fixtures that run a real Hub on a loopback port, each on a directory of its own."""

import pytest
from huggingface_hub import HfApi

from tests.support.running_hub import RunningHub, hub, start_hub
from tests.support.small_kernel import KERNEL

__all__ = ["hub", "start_hub"]


@pytest.fixture
def api(hub: RunningHub) -> HfApi:
    """The client of the Hub, which has the empty kernels `a/one` and `KERNEL`."""
    for repo_id in ("a/one", KERNEL):
        hub.api().create_repo(repo_id, repo_type="kernel")
    return hub.api()
