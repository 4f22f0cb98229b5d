"""The JSON schema of build.toml, which editors read, agrees with the reader."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jsonschema
import pytest

from kernel_builder import toml_file
from kernel_builder.config import build_toml
from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import general, in_edition_6
from tests.unit.config.build_toml.test_accepted import ACCEPTED
from tests.unit.config.build_toml.test_rejected import REJECTED

ROOT = Path(__file__).parents[4]
SCHEMA = ROOT / "kernel_builder/config/build.schema.json"
# For JSON schema, an integral number is an integer; in Python, `$` matches before a newline.
NOT_IN_JSON = {in_edition_6(text) for text in (general(name='"ab\\n"'), general(version="1.0"), general(edition="5.0"))}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(build_toml.SCHEMA)


def test_every_build_toml_of_the_repository_is_valid() -> None:
    files = subprocess.check_output(["git", "ls-files", "*build.toml"], cwd=ROOT, text=True).splitlines()
    # The schema is of the newest edition, and tests read this project in edition 5.
    files = [name for name in files if "/templates/" not in name and name != "tests/projects/full-scale/build.toml"]
    checker = str(Path(sys.executable).with_name("check-jsonschema"))
    subprocess.run([checker, "--schemafile", str(SCHEMA), *files], cwd=ROOT, check=True)


def test_accepted_documents_are_valid(validator: jsonschema.Draft7Validator) -> None:
    for text in ACCEPTED:
        validator.validate(toml_file.parse(in_edition_6(text).removeprefix("\ufeff"), "build.toml"))


def test_rejected_documents_are_invalid(validator: jsonschema.Draft7Validator) -> None:
    valid = set()
    for text in map(in_edition_6, (text for text in REJECTED if len(text) < 10_000)):
        with suppress(ConfigError):
            if validator.is_valid(toml_file.parse(text, "build.toml")):
                valid.add(text)
    assert valid == NOT_IN_JSON
