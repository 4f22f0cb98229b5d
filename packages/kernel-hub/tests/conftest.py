"""Fixtures of Hubs with tokens, and with empty kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from raw_requests import TokenHub

from kernel_hub import tokens
from tests.support.running_hub import RunningHub
from tests.support.small_kernel import KERNEL


@pytest.fixture
def token_hub(start_hub: Callable[..., RunningHub], tmp_path: Path) -> TokenHub:
    """A function that starts a Hub with `tokens.json`; returns it and the tokens: `token_hub(ci={"write": ("a",)})`."""

    def start(*arguments: str, **scopes: dict[str, Any]) -> tuple[Any, ...]:
        file = tmp_path / "tokens.json"
        secrets = [tokens.add(file, name, **{"read": (), "write": (), **given}) for name, given in scopes.items()]
        return start_hub("--token-file", str(file), *arguments), *secrets

    return start


@pytest.fixture
def api(hub: RunningHub) -> HfApi:
    """The client of the Hub, which has the empty kernels `a/one` and `KERNEL`."""
    for repo_id in ("a/one", KERNEL):
        hub.api().create_repo(repo_id, repo_type="kernel")
    return hub.api()
