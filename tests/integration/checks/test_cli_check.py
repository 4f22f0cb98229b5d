"""The output and the exit status of the check commands."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import expect
from tests.support.sample_package import assemble


def test_check_builds_reports_findings_and_ends_with_7(tmp_path: Path) -> None:
    package = assemble(tmp_path / "build", "torch-cpu", None)
    checks = "layout, digest, python-source, python-imports, op-namespace, load"
    passed = expect(0, f"passed   {checks}", "check-builds", tmp_path)
    assert "skipped  manylinux: the package has no binary" in passed.output
    (package / "__init__.py").write_text("import transformers\n")
    message = "error    python-imports: __init__.py: line 1: imports transformers"
    failed = expect(7, message, "check-builds", tmp_path)
    assert "use the standard library and Torch only" in failed.output
    answer = json.loads(expect(7, "", "check-builds", tmp_path, "--json").stdout)
    (checked,) = answer["packages"]
    assert (answer["ok"], checked["variant"]) == (False, "torch-cpu")
    found = {finding["check"]: finding for finding in checked["findings"]}
    assert found.keys() >= {"digest", "python-imports"}
    assert found["python-imports"].keys() == {"check", "path", "message", "hint", "severity"}


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    expect(7, f"kernel-builder build {tmp_path}", "check-builds", tmp_path)
