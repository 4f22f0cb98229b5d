"""The output and the exit status of the check commands."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import invoke
from tests.support.sample_package import assemble


def test_check_builds_reports_findings_and_ends_with_7(tmp_path: Path) -> None:
    package = assemble(tmp_path / "build", "torch-cpu", None)
    passed = invoke("check-builds", tmp_path)
    assert passed.exit_code == 0, passed.output
    assert "passed   layout, digest, python-source, python-imports, op-namespace, load" in passed.output
    assert "skipped  manylinux: the package has no binary" in passed.output
    (package / "__init__.py").write_text("import transformers\n")
    failed = invoke("check-builds", tmp_path)
    assert failed.exit_code == 7
    assert "error    python-imports: __init__.py: line 1: imports transformers" in failed.output
    assert "use the standard library and Torch only" in failed.output
    result = invoke("check-builds", tmp_path, "--json")
    answer = json.loads(result.stdout)
    (checked,) = answer["packages"]
    assert (result.exit_code, answer["ok"], checked["variant"]) == (7, False, "torch-cpu")
    found = {finding["check"]: finding for finding in checked["findings"]}
    assert found.keys() >= {"digest", "python-imports"}
    assert found["python-imports"].keys() == {"check", "path", "message", "hint", "severity"}


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    result = invoke("check-builds", tmp_path)
    assert result.exit_code == 7
    assert f"kernel-builder build {tmp_path}" in result.output
