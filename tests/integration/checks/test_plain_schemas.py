"""Torch accepts the schemas that a build takes without asking it; else a mistake in one costs a compile."""

from __future__ import annotations

import builtins
import keyword

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_builder.checks import ProbeProcess, check_op_sources
from kernel_builder.checks.registrations import PLAIN_SCHEMA
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from tests.support.places import CPU, PROJECTS


@settings(max_examples=30, deadline=None)
@given(st.from_regex(PLAIN_SCHEMA, fullmatch=True))
def test_torch_accepts_every_plain_schema(schema: str) -> None:
    torch.library.Library("plain", "FRAGMENT").define(schema)  # type: ignore[no-untyped-call]


def test_torch_accepts_the_names_of_plain_schemas() -> None:
    library = torch.library.Library("plain", "FRAGMENT")  # type: ignore[no-untyped-call]
    names = [name for name in (*dir(builtins), *keyword.softkwlist, "NoneType") if not keyword.iskeyword(name)]
    for schema in (f"{name}(Tensor {name}, int {name}=1) -> ()" for name in names):
        if PLAIN_SCHEMA.fullmatch(schema):
            library.define(schema)


def test_plain_schemas_start_no_process() -> None:
    with ProbeProcess("/no/python") as probe:
        assert check_op_sources(read_project(PROJECTS / "stable-scale"), Variant.parse(CPU), probe) == []
