"""Skips tests that need Triton where no build has fetched it."""

from __future__ import annotations

import pytest

from kernel_builder.aot.generation import compiler_component
from kernel_builder.toolchain import Toolchains


def require_triton() -> None:
    tools = Toolchains()
    if tools.store.find(tools.lock[compiler_component({})]["any"].name) is None:
        pytest.skip(
            "Triton is not in the toolchain store: kernel-builder build of a project with an aot.toml fetches it"
        )
