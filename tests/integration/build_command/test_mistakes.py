"""Mistakes of authors: one finding for each, with the author's file and line. One command builds all projects."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kernel_builder import toml_file
from tests.integration.build_command.conftest import Run
from tests.support.places import PROJECTS, SOURCES

MISTAKES: Mapping[str, Mapping[str, Any]] = toml_file.read(Path(__file__).with_name("mistakes.toml"))["mistake"]
HEAD = '#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n\n#include "registration.h"\n\n'

FindingsOf = Callable[[str], list[tuple[str, str, str]]]


def write(project: Path, mistake: Mapping[str, Any]) -> None:
    """Write a project with a mistake from the example that it changes."""
    example = "full-scale" if "full-abi" in mistake else "stable-scale" if "binding" in mistake else "python-only"
    config = (PROJECTS / example / "build.toml").read_text().replace(example, project.name)
    package = project / "torch-ext" / project.name.replace("-", "_")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(mistake.get("init", SOURCES["fake_of_scaled"]))
    if "binding" in mistake:
        shutil.copytree(PROJECTS / example / "scale", project / "scale")
        (project / "torch-ext/torch_binding.cpp").write_text(("" if "whole" in mistake else HEAD) + mistake["binding"])
        config = config[: config.index("[kernel.")].replace('["cpu", "cuda"]', '["cpu"]')
    (project / "build.toml").write_text(config)


@pytest.fixture(scope="module")
def findings_of(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> FindingsOf:
    """Return the findings in a project: severity, then check, path and message, then the advice."""
    root = tmp_path_factory.mktemp("mistakes")
    for name, mistake in MISTAKES.items():
        write(root / name, mistake)
    answer = Run(shared_cache)(shared_cache, "build", *(root / name for name in MISTAKES), "--backend", "cpu").answer
    reports = {outcome["project"]: outcome["checks"] for outcome in (*answer["failures"], *answer["packages"])}
    errors = {failed["project"]: failed["errors"] for failed in answer["failures"]}

    def of(name: str) -> list[tuple[str, str, str]]:
        if reports[name] is None:
            return [("error", error["message"], error["hint"]) for error in errors[name]]
        findings = reports[name]["findings"]
        assert str(root) not in json.dumps(findings), "a directory that is gone"
        return [(f["severity"], f"{f['check']}: {f['path']}: {f['message']}", f["hint"]) for f in findings]

    return of


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_findings_and_no_others(findings_of: FindingsOf, name: str) -> None:
    findings, expected = findings_of(name), MISTAKES[name]["findings"]
    assert len(findings) == len(expected), findings
    for (severity, message, hint), finding in zip(findings, expected, strict=True):
        assert severity == finding.get("severity", "error")
        text = re.sub(rf"_{name}_c[^.:' ]*", "MODULE", message)
        assert all(part in text for part in finding["message"].split(" ... ")), text
        assert finding["hint"] in hint
        assert "toolchains" not in message
